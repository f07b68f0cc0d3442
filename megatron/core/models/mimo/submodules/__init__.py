"""Encoders, decoders and projections of one modality."""

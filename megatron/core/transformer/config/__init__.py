"""Dataclasses, one per topic, that TransformerConfig inherits from."""

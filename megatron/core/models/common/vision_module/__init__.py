"""Base of encoders of images."""

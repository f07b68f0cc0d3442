"""Engines that generate tokens from prompts."""

"""Datasets of the application."""

"""Flags as metadata on frozen dataclasses, and the errors users see."""

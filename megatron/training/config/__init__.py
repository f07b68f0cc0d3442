"""Run configuration: frozen dataclasses, each a section of the command-line flags."""

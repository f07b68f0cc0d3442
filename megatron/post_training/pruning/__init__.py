"""Pruning of a GPT by the importance of its parts."""

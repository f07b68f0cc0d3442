"""Importable because scripts import it; ``--use-legacy-models``, which needs it, is refused."""

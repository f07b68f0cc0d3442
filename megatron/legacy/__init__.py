"""Importable because scripts import it; the models from before megatron.core are not here."""

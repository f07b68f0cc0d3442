"""Preprocess text files to token files: library of the programs in ``tools/``, without torch."""

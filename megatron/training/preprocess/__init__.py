"""From text files to token files: what the programs in ``tools/`` run.  Needs no torch."""

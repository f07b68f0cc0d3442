"""A single process of a run, from its environment and output to its signals and exit report."""

"""The live objects of a run, and how they are built from its configuration."""

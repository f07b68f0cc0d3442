"""From a command line to a checked RunConfig."""

"""Process-level services: printing on ranks, signals, rendezvous, failure detection."""

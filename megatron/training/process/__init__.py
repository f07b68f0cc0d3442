"""This process and its peers: printing, signals, rendezvous, watching for failures."""

"""Heartbeats of ranks and the limits by which a hang is found; the modules import no torch."""

"""Diagnostics of a run: trace of collectives, straggler times, timers, fault injection."""

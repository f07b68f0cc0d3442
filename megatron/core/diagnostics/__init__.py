"""What a run reports of itself: collectives, stragglers, timers; and injected faults."""

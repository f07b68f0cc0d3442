"""Find faults of a run and go on: ranks report and watch each other, a supervisor restarts them."""

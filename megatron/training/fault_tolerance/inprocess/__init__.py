"""Restart inside the processes after a fault (--inprocess-restart)."""

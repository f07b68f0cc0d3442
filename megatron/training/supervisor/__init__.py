"""Supervisor of a run (tools/launch.py): restarts on torch's elastic agent; no model code."""

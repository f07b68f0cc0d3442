"""Compatibility API: functions for scripts that were written for Megatron-LM."""

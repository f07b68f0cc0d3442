"""Validate the results of a step, and compute it again to find the cause of an unexpected one."""

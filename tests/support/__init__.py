"""Helpers of tests; no tests."""

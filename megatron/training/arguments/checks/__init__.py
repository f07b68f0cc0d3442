"""Checks of a RunConfig: one function per rule, grouped by subject, all reported together.

A check receives the assembled RunConfig and yields one error message per violation: the flags, the
values found, the suggested fix.  Missing sizes are 0, so that the other rules can still be checked;
`required` reports the missing ones.
"""

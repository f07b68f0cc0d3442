"""Rules about the combination of flags, as data, one module per subject.

`rule.py` evaluates them.  Missing sizes are 0, so that the other rules can still be checked;
`files.py` reports the missing ones.
"""

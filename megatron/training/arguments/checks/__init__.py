"""What a run may not ask for: one function a rule, grouped by subject, all reported together.

A check takes the assembled RunConfig and yields one sentence for each violation: the flags, the
values found, the cure.  Shapes that are missing are 0 there, so that the other rules can still be
applied; `required` reports them.
"""

"""What a run may not ask for: one function a rule, grouped by subject, all reported together."""

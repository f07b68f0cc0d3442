"""Memory of a running rank: its peak before the first step, its owners, out-of-memory reports."""

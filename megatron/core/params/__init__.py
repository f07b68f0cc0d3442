"""Parameters: their layout-free names and shapes, and their initial values."""

"""GPT whose layers differ in shape."""

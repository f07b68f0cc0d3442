"""GPT with layers of differing shape."""

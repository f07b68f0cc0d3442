"""Complete models, one directory each."""

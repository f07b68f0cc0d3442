"""One file a kernel, its plain form beside it."""

"""The server: an HTTP front end in a process of its own, and the loop that feeds the engine."""

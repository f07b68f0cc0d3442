"""Serving: the text of requests, and the server that answers them over HTTP."""

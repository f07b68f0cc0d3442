"""Live objects of a run (model, optimizer, data, groups) and the functions that build them."""

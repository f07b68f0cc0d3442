"""Layers of other packages in the places of ours."""

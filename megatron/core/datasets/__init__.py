"""Token files, training samples, blends of datasets and samplers."""

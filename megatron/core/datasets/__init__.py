"""Token files, samples, blends and samplers."""

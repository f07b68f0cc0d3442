"""State-space models: Mamba-2 layers, and hybrid stacks of Mamba, attention, MLP and MoE layers."""

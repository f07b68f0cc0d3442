"""Mixture of experts (MoE): router, token dispatcher, experts."""

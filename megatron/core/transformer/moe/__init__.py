"""Mixture of experts: route, dispatch, experts, combine."""

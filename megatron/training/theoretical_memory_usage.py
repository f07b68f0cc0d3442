"""Megatron-LM's import path of `report_theoretical_memory`."""

from megatron.training.compat.arguments import (
    report_theoretical_memory as report_theoretical_memory,
)

"""Megatron-LM's import path of `report_theoretical_memory`."""

from megatron.training.compat.theoretical_memory import (
    report_theoretical_memory as report_theoretical_memory,
)

"""The path under which scripts import the estimate of memory."""

from megatron.training.compat.theoretical_memory import (
    report_theoretical_memory as report_theoretical_memory,
)

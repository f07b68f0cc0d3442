"""Programs that use megatron.core as a library; the same code runs on NVIDIA's release.

`tools/dev/library_judge.py` runs them with both libraries, compares, and records NVIDIA's values
for `test_megatron_core_cases.py`.
"""

from . import checkpoints, functions, models, training
from .frame import CASES, run_cases

__all__ = ["CASES", "checkpoints", "functions", "models", "run_cases", "training"]

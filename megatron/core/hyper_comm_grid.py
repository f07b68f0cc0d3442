"""Megatron-LM's import path of `megatron.core.parallel.hyper_comm_grid`: the same module."""

import sys

from megatron.core.parallel import hyper_comm_grid

sys.modules[__name__] = hyper_comm_grid

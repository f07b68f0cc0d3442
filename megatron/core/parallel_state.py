"""Megatron-LM's import path of `megatron.core.parallel.parallel_state`: the same module."""

import sys

from megatron.core.parallel import parallel_state

sys.modules[__name__] = parallel_state

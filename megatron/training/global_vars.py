"""Megatron-LM's import path of `megatron.training.compat.global_vars`: the same module."""

import sys

from megatron.training.compat import global_vars

sys.modules[__name__] = global_vars

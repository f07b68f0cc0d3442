"""Megatron-LM's import path of `megatron.core.diagnostics.timers`: the same module."""

import sys

from megatron.core.diagnostics import timers

sys.modules[__name__] = timers

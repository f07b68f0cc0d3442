"""Megatron-LM's import path of `megatron.training.compat.utils`: the same module."""

import sys

from megatron.training.compat import utils

sys.modules[__name__] = utils

"""Megatron-LM's import path of `megatron.core.parallel.process_groups_config`: the same module."""

import sys

from megatron.core.parallel import process_groups_config

sys.modules[__name__] = process_groups_config

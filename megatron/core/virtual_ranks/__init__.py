"""Virtual ranks: run all ranks of a layout as threads of one process, to debug it."""

from megatron.core.optional import lazy_exports

BACKEND = "virtual"
__getattr__ = lazy_exports(__name__, {"run": "megatron.core.virtual_ranks.threads"})

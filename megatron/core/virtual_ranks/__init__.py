"""Several ranks in one process: threads that take turns, for a layout in a debugger."""

from megatron.core.lazy import lazy_exports

BACKEND = "virtual"
__getattr__ = lazy_exports(
    __name__, dict.fromkeys(("run", "without_groups"), "megatron.core.virtual_ranks.threads")
)

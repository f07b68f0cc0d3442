"""Several ranks in one process: threads that take turns, for a layout in a debugger."""

from megatron.core.virtual_ranks.run import run as run

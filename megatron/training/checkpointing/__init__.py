"""Save and load the checkpoints of a run, with its arguments and random states."""

from megatron.core.optional import lazy_exports

_COMPATIBILITY_API = (
    "save_checkpoint",
    "load_checkpoint",
    "load_args_from_checkpoint",
    "get_checkpoint_name",
    "get_checkpoint_tracker_filename",
)

__getattr__ = lazy_exports(
    __name__,
    dict.fromkeys(_COMPATIBILITY_API, "megatron.training.compat.checkpointing"),
)

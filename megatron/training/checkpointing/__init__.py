"""Checkpoint directories of a run: saving, loading, arguments and random states from them."""

from megatron.core.lazy import lazy_exports

_FACADE = (
    "save_checkpoint",
    "load_checkpoint",
    "load_args_from_checkpoint",
    "get_checkpoint_name",
    "get_checkpoint_tracker_filename",
)

__getattr__ = lazy_exports(
    __name__,
    {
        **dict.fromkeys(_FACADE, "megatron.training.compat.checkpointing"),
        "RunParts": "megatron.training.checkpointing.checkpoint_tensors",
        "save_run": "megatron.training.checkpointing.save",
        "load_run": "megatron.training.checkpointing.load",
        "open_checkpoint": "megatron.training.checkpointing.paths",
        "apply_checkpoint_args": "megatron.training.checkpointing.checkpoint_args",
    },
)

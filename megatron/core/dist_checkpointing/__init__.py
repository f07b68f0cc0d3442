"""Checkpoints that any layout can read: records of tensors, the file format, the commit."""

from megatron.core.lazy import lazy_exports

__getattr__ = lazy_exports(
    __name__,
    {
        "ShardedTensor": "megatron.core.dist_checkpointing.mapping",
        "save": "megatron.core.dist_checkpointing.serialization",
        "load": "megatron.core.dist_checkpointing.serialization",
        "CheckpointReader": "megatron.core.dist_checkpointing.reader",
    },
)

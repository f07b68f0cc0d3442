"""Checkpoints that any parallel layout can load: tensor records, formats, atomic publishing."""

from megatron.core.lazy import lazy_exports

__getattr__ = lazy_exports(
    __name__,
    {
        "ShardedTensor": "megatron.core.dist_checkpointing.mapping",
        "ShardedObject": "megatron.core.dist_checkpointing.mapping",
        "ShardedTensorFactory": "megatron.core.dist_checkpointing.mapping",
        "LocalNonpersistentObject": "megatron.core.dist_checkpointing.mapping",
        "save": "megatron.core.dist_checkpointing.state_dict_api",
        "load": "megatron.core.dist_checkpointing.state_dict_api",
        "load_common_state_dict": "megatron.core.dist_checkpointing.state_dict_api",
        "load_content_metadata": "megatron.core.dist_checkpointing.state_dict_api",
        "CheckpointReader": "megatron.core.dist_checkpointing.reader",
    },
)

"""Checkpoints that any parallel layout can load: tensor records, formats, atomic publishing.

A save, action by action; with --async-save a thread copies, writes and completes (`background`):

    all_ranks.begin     collective: create ``iter_N.tmp-{attempt}`` (`commit.create_folder`)
    background.snapshot     copy the values to host memory, with --async-save
    all_ranks.write     each rank: its files (`Format.write_rank_files`)
    all_ranks.complete  rank 0: common files (`Format.write_common_files`), manifest, rename
                            and tracker (`commit.publish`), then retention (`commit.retire`)
    all_ranks.conclude  collective: the verdict of rank 0

A load: choose the folder (`folders.choose`), open it (`formats.open_reader`), compare its keys with
those of the run (`validation`), read each box of each tensor (`all_ranks.load`, `reader`).
"""

from megatron.core.optional import lazy_exports

__getattr__ = lazy_exports(
    __name__,
    {
        "ShardedTensor": "megatron.core.dist_checkpointing.mapping",
        "ShardedObject": "megatron.core.dist_checkpointing.mapping",
        "ShardedTensorFactory": "megatron.core.dist_checkpointing.mapping",
        "LocalNonpersistentObject": "megatron.core.dist_checkpointing.mapping",
        "save": "megatron.core.dist_checkpointing.serialization",
        "load": "megatron.core.dist_checkpointing.serialization",
        "load_common_state_dict": "megatron.core.dist_checkpointing.serialization",
        "load_content_metadata": "megatron.core.dist_checkpointing.serialization",
        "CheckpointReader": "megatron.core.dist_checkpointing.reader",
    },
)

"""A small model as plain tensors, cut for any tensor-parallel size, saved without processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from megatron.core.dist_checkpointing import commit
from megatron.core.dist_checkpointing.formats import (
    Contents,
    RankSave,
    files_of,
    write_common_files,
    write_rank_files,
)
from megatron.core.dist_checkpointing.reader import CheckpointReader
from megatron.core.dist_checkpointing.records import Replica, TensorRecord, from_param
from megatron.core.params.param_info import ParamInfo

# name -> (global shape, dimension that tensor parallelism cuts, blocks, rows with padding)
PARAMS: dict[str, tuple[tuple[int, ...], int | None, int, int | None]] = {
    "embedding.weight": ((10, 8), 0, 1, 12),  # vocabulary of 10, padded to 12
    "layers.0.qkv.weight": ((12, 8), 0, 1, None),
    "layers.0.proj.weight": ((8, 12), 1, 1, None),
    "layers.0.gated.weight": ((16, 8), 0, 2, None),
    "layers.0.gated.bias": ((16,), 0, 2, None),
    "layers.0.norm.weight": ((8,), None, 1, None),
    "temperature": ((), None, 1, None),
}


def global_tensors(seed: int = 0) -> dict[str, Tensor]:
    """The whole model, without padding."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, (shape, *_) in PARAMS.items()}


def info(name: str, tp: int, rank: int) -> ParamInfo:
    shape, dim, blocks, _ = PARAMS[name]
    if dim is None:
        return ParamInfo(global_shape=shape, name=name)
    return ParamInfo(
        global_shape=shape,
        name=name,
        shard_dim=dim,
        shard_index=rank,
        shard_count=tp,
        blocks=(1,) * blocks,
    )


def local_shape(name: str, tp: int) -> tuple[int, ...]:
    shape, dim, _, padded = PARAMS[name]
    if dim is None:
        return shape
    rows = padded if padded is not None else shape[dim]
    return (*shape[:dim], rows // tp, *shape[dim + 1 :])


def shares(whole: Mapping[str, Tensor], tp: int, rank: int) -> dict[str, Tensor]:
    """What ``rank`` of ``tp`` holds, padding zero.  Cut without the code under test."""
    out = {}
    for name, tensor in whole.items():
        _, dim, blocks, padded = PARAMS[name]
        if dim is None:
            out[name] = tensor.clone()
            continue
        if padded is not None:
            rows = tensor.new_zeros(padded - tensor.shape[0], *tensor.shape[1:])
            tensor = torch.cat([tensor, rows])
        parts = [block.chunk(tp, dim)[rank] for block in tensor.chunk(blocks, dim)]
        out[name] = torch.cat(parts, dim).clone()
    return out


def records(local: Mapping[str, Tensor], tp: int, rank: int) -> list[TensorRecord]:
    """Records of one tensor-parallel rank, each value with one writer."""
    out = []
    for name, tensor in local.items():
        is_whole = PARAMS[name][1] is None
        replica = None if is_whole and rank > 0 else Replica()
        out.append(from_param(name, info(name, tp, rank), tensor, replica))
    return out


def publish_ranks(root: Path, iteration: int, ranks: Sequence[Sequence[TensorRecord]]) -> Path:
    """Save what several ranks hold, one after the other in this process."""
    attempt = commit.claim(root)
    pending = commit.create_folder(root, iteration, 0, attempt)
    reports = [
        write_rank_files(
            RankSave(
                folder=pending.folder,
                rank=rank,
                tensors=[t for t in tensors if t.replica is not None],
                contents=Contents(tensors=(), rank_state={"rng_state": rank}),
                iteration=iteration,
                attempt=attempt,
            )
        )
        for rank, tensors in enumerate(ranks)
    ]
    files = files_of(reports)
    common = {"iteration": iteration, "args": {}, "checkpoint_version": 3.0, "counters": {}}
    files |= write_common_files(pending.folder, reports, common)
    return commit.publish(pending, {"world_size": len(ranks)}, files)


def publish_model(root: Path, iteration: int, *, tp: int = 1, seed: int = 0) -> Path:
    """Save the model of ``seed`` as ``tp`` ranks would."""
    whole = global_tensors(seed)
    ranks = [records(shares(whole, tp, rank), tp, rank) for rank in range(tp)]
    return publish_ranks(root, iteration, ranks)


def names_in(root: Path) -> list[str]:
    """What lies in a save directory, sorted, but for the newest claim."""
    return sorted(path.name for path in root.iterdir() if not path.name.startswith(".attempt-"))


def read_all(folder: Path) -> dict[str, Tensor]:
    """Everything that can be read from a checkpoint; raises if any of it is damaged."""
    with CheckpointReader(folder) as reader:
        reader.check_files()
        reader.common()
        return {key: reader.read(key) for key in reader.tensors}

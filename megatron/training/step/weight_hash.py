"""Hashes of the weights: to compare runs, and to compare data-parallel ranks of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron.core.config.errors import MegatronError
from megatron.core.dist_checkpointing.hashing import hash_here, hash_of_all
from megatron.core.dist_checkpointing.records import TensorRecord, to_write
from megatron.core.dist_checkpointing.validation import shorten
from megatron.core.parallel.collectives import all_gather_json
from megatron.training.checkpointing.checkpoint_tensors import RunParts, model_tensors
from megatron.training.process import exit_report

_UNKNOWN = -1  # in place of a rank


class ReplicasDiffer(MegatronError, RuntimeError):
    """Weights that should be equal on all data-parallel ranks differ."""


def params_hash(parts: RunParts) -> int:
    """Return a 64-bit hash of all weights; it is the same in every layout.

    Collective over all ranks.
    """
    return hash_of_all(to_write(model_tensors(parts), share_work=False), parts.groups.world)


def check_replicas(parts: RunParts, iteration: int) -> None:
    """Compare each weight over its data-parallel ranks.  Collective over all ranks.

    Raises ReplicasDiffer on every rank; the message lists the ranks whose weights differ from those
    of the majority, and the weights.  The exit report blames these ranks.
    """
    tensors = model_tensors(parts)
    problems: list[tuple[int, str]] = []
    for among, group in (("dp_cp", parts.groups.dp_cp), ("expt_dp", parts.groups.expt_dp)):
        mine = [t for t in tensors if t.replica is not None and t.replica.among == among]
        problems += _differences(mine, group, dist.get_rank())
    found = {
        (rank, text)
        for some in all_gather_json(problems, parts.groups.world)
        for rank, text in some
    }
    if not found:
        return
    for rank in sorted({rank for rank, _ in found} - {_UNKNOWN}):
        exit_report.blame(rank, f"weights differ from those of its replicas after step {iteration}")
    raise ReplicasDiffer(
        f"after step {iteration} weights differ between data-parallel ranks, which must hold "
        f"equal values: {shorten(sorted(text for _, text in found))}; the cause is a faulty device "
        "or interconnect, or a nondeterministic kernel: resume from a checkpoint without these "
        "devices"
    )


def _differences(
    tensors: Sequence[TensorRecord], group: ProcessGroup, rank: int
) -> list[tuple[int, str]]:
    """Return this rank and a message for each tensor whose hash is not that of the majority.

    Without a majority, as with two replicas, nobody knows which rank is wrong (`_UNKNOWN`).
    Collective over ``group``.
    """
    if not tensors or group.size() == 1:
        return []
    mine = torch.stack([hash_here(tensor) for tensor in tensors])
    hashes = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(hashes, mine, group=group)
    columns = torch.stack(hashes, dim=1).tolist()
    ranks = " ".join(map(str, dist.get_process_group_ranks(group)))
    found = []
    for tensor, hash, column in zip(tensors, mine.tolist(), columns, strict=True):
        usual, count = Counter(column).most_common(1)[0]
        if 2 * count <= group.size():
            found.append(
                (
                    _UNKNOWN,
                    f"ranks {ranks} have different values of {tensor.key}, without a majority that "
                    "shows which are wrong",
                )
            )
        elif hash != usual:
            found.append((rank, f"rank {rank} has other values of {tensor.key}"))
    return found

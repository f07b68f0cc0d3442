"""Read micro-batches: tensor-parallel rank 0 reads and broadcasts to its group.

Collective over the tensor-parallel group: one broadcast per tensor, in the order of the table.
Attention kernels are started for the number of documents, which differs between micro-batches: a
broadcast between the hosts precedes the bounds of documents, so that no host waits for its device.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core import device
from megatron.core.diagnostics.straggler import StragglerDetector
from megatron.core.packed_seq_params import PackedBounds, PackedSeqParams
from megatron.core.rank_local import each_rank_owns
from megatron.core.utils import get_attr_wrapped_model, get_batch_on_this_cp_rank
from megatron.training.data.balanced_rows import BalancedRows
from megatron.training.data.loaders import batch_table
from megatron.training.models.kind import BatchTable, DocumentSpec, TensorSpec
from megatron.training.models.registry import implementation_of
from megatron.training.runtime.context import RunContext
from megatron.training.runtime.source_losses import SOURCE_IDS

_stimer = StragglerDetector()
# Group of devices -> group of the same ranks' hosts, made by the first micro-batch with bounds of
# documents.  An entry ends with its key: a later run of this process has other groups.
_host_groups: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()
each_rank_owns(__name__, "_host_groups")


def next_batch(
    run: RunContext, data_iterator: Iterator[dict[str, Tensor]] | None, model: nn.Module
) -> dict[str, Any]:
    """Return this rank's context-parallel part of the next micro-batch of ``model``.

    Tensors that the pipeline stage of ``model`` does not need are None; a stage that needs none
    does not advance ``data_iterator``.  Collective over the tensor-parallel group.
    """
    run.timers("batch-generator", log_level=2).start()
    stage = run.stages[get_attr_wrapped_model(model, "vp_stage") or 0]
    groups = run.groups
    if isinstance(data_iterator, BalancedRows):
        groups = data_iterator.use_next_group(model)
    with _stimer(bdata=True):
        kind = implementation_of(run.config)
        table = batch_table(run, stage)
        batch = load_batch(data_iterator, table, run.groups.tp)
        if kind.joins_rows:
            batch = _as_one_row(batch, table, groups.cp, is_planned=_is_planned(groups.tp))
        elif not kind.splits_sequences:
            batch = get_batch_on_this_cp_rank(batch, run.groups.cp)
        if run.sources is not None:
            run.sources.expect(batch.pop(SOURCE_IDS), batch["loss_mask"])
    run.timers("batch-generator").stop()
    return batch


def load_batch(
    data_iterator: Iterator[dict[str, Tensor]] | None,
    table: BatchTable,
    tp_group: dist.ProcessGroup,
) -> dict[str, Any]:
    """Return the tensors of ``table`` on the current device.

    Collective over ``tp_group``: its rank 0 reads from ``data_iterator``, the others receive.
    """
    target = device.current()
    reads = tp_group.rank() == 0 and any(table.values())
    item = next(data_iterator) if reads and data_iterator is not None else {}
    batch: dict[str, Any] = dict.fromkeys(table)
    sizes = _agreed_sizes(item, table, tp_group)
    for name, expected in table.items():
        if expected is None:
            continue
        value = item[name] if reads else _without_values(expected, sizes.get(name), target)
        tensor = value.cumulative if isinstance(value, PackedBounds) else value
        # A collective reads memory in order, and a loader may return slices of larger tensors.
        tensor = tensor.to(target, non_blocking=True).contiguous()
        if tp_group.size() > 1 and tensor.numel():
            dist.broadcast(tensor, dist.get_global_rank(tp_group, 0), group=tp_group)
        batch[name] = tensor
        if isinstance(value, PackedBounds):
            batch[name] = PackedBounds(tensor, value.longest)
        if isinstance(expected, DocumentSpec) and expected.is_trimmed:
            full = expected.num_rows * expected.num_tokens
            batch["trimmed"] = (sizes[name].num_tokens if name in sizes else full, full)
    return batch


def _as_one_row(
    batch: dict[str, Any], table: BatchTable, cp_group: dist.ProcessGroup, *, is_planned: bool
) -> dict[str, Any]:
    """Return this rank's part of a micro-batch whose rows follow each other in one row.

    Tensors [b, s, ...] become [1, b s / cp, ...]; those [n] of rows of different lengths, which
    follow each other already, [1, n / cp].  Context parallelism splits each packed sample.
    ``trimmed``: n and b s if rows may differ in length, else None.
    """
    spec = table["packed_seq_params"]
    assert isinstance(spec, DocumentSpec), "every stage reads the bounds of samples"
    bounds = batch.pop("packed_seq_params")
    trimmed = batch.pop("trimmed", None)
    lengths = (spec.num_tokens,) * spec.num_rows if is_planned else ()
    packed = PackedSeqParams.of_bounds(bounds, lengths)
    rows = {
        name: None if x is None else (x if x.dim() == 1 else x.flatten(0, 1))[None]
        for name, x in batch.items()
    }
    if cp_group.size() > 1:
        rows = get_batch_on_this_cp_rank(rows, cp_group, lengths=packed.lengths)
    return {**rows, "packed_seq_params": packed, "trimmed": trimmed}


class _Size(NamedTuple):
    """Size of an entry of a batch that differs between micro-batches."""

    num_rows: int = 0  # or number of bounds; 0: a mask has taken the place of bounds
    longest: int = 0  # document
    num_tokens: int = 0

    @classmethod
    def of(cls, value: Any) -> _Size:
        """Return the size of what a rank has read."""
        if isinstance(value, PackedBounds):
            return cls(len(value.cumulative), value.longest, int(value.cumulative[-1]))
        return cls(len(value))


def _agreed_sizes(
    item: dict[str, Any], table: BatchTable, tp_group: dist.ProcessGroup
) -> dict[str, _Size]:
    """Return the sizes of entries that differ between micro-batches, as rank 0 has read them.

    The planner has none.  Collective over ``tp_group`` if the table has such entries: one broadcast
    between hosts.
    """
    if _is_planned(tp_group):
        return {}
    names = [
        name
        for name, spec in table.items()
        if isinstance(spec, DocumentSpec) or (spec is not None and spec.is_joined)
    ]
    found = {}
    for name in names if tp_group.rank() == 0 else ():
        is_mask = isinstance(table[name], DocumentSpec) and torch.is_tensor(item.get(name))
        found[name] = _Size() if is_mask else _Size.of(item[name])
    if tp_group.size() == 1 or not names:
        return found
    sizes = torch.zeros(len(names), len(_Size._fields), dtype=torch.int64)
    if found:
        sizes = torch.tensor(list(found.values()))
    dist.broadcast(sizes, dist.get_global_rank(tp_group, 0), group=_between_hosts(tp_group))
    return {name: _Size(*size) for name, size in zip(names, sizes.tolist(), strict=True)}


def _without_values(
    expected: TensorSpec | DocumentSpec, size: _Size | None, target: torch.device
) -> PackedBounds | Tensor:
    """Return an entry of a batch that a broadcast fills; ``size`` is that of rank 0, if it varies.

    Data of the user may have a mask in place of bounds.
    """
    if size is None:
        return expected.largest(target)
    if isinstance(expected, TensorSpec):
        return torch.empty(size.num_rows, *expected.shape[1:], dtype=expected.dtype, device=target)
    if not size.num_rows:
        return expected.mask.empty(target)
    return PackedBounds(torch.empty(size.num_rows, dtype=torch.int32, device=target), size.longest)


def _is_planned(group: dist.ProcessGroup) -> bool:
    """Return whether the planner calls, whose groups send nothing."""
    return "fake" in dist.get_backend(group)


def _between_hosts(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a group of the same ranks that sends tensors of the host."""
    if "nccl" not in dist.get_backend(group):
        return group
    if group not in _host_groups:
        _host_groups[group] = dist.new_group(
            dist.get_process_group_ranks(group),
            backend="gloo",
            use_local_synchronization=True,
            group_desc="documents",
        )
    return _host_groups[group]

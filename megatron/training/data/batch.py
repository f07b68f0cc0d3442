"""Read micro-batches: tensor-parallel rank 0 reads and broadcasts to its group.

Collective over the tensor-parallel group: one broadcast per tensor, in the order of the table.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core import device
from megatron.core.diagnostics.straggler import StragglerDetector
from megatron.core.utils import get_attr_wrapped_model, get_batch_on_this_cp_rank
from megatron.training.models.kind import BatchTable
from megatron.training.models.registry import implementation_of
from megatron.training.runtime.runtime import Runtime

_stimer = StragglerDetector()


def next_batch(
    run: Runtime, data_iterator: Iterator[dict[str, Tensor]] | None, model: nn.Module
) -> dict[str, Tensor | None]:
    """Return this rank's context-parallel part of the next micro-batch of ``model``.

    Tensors that the pipeline stage of ``model`` does not need are None; a stage that needs none
    does not advance ``data_iterator``.  Collective over the tensor-parallel group.
    """
    run.timers("batch-generator", log_level=2).start()
    stage = run.stages[get_attr_wrapped_model(model, "vp_stage") or 0]
    with _stimer(bdata=True):
        table = implementation_of(run.config).batch(run.config, stage, run.placement.num_stages)
        batch = load_batch(data_iterator, table, run.groups.tp)
        batch = get_batch_on_this_cp_rank(batch, run.groups.cp)
    run.timers("batch-generator").stop()
    return batch


def load_batch(
    data_iterator: Iterator[dict[str, Tensor]] | None,
    table: BatchTable,
    tp_group: dist.ProcessGroup,
) -> dict[str, Tensor | None]:
    """Return the tensors of ``table`` on the current device.

    Collective over ``tp_group``: its rank 0 reads from ``data_iterator``, the others receive.
    """
    target = device.current()
    reads = tp_group.rank() == 0 and any(table.values())
    item = next(data_iterator) if reads and data_iterator is not None else {}
    batch: dict[str, Tensor | None] = dict.fromkeys(table)
    for name, expected in table.items():
        if expected is None:
            continue
        if reads:
            tensor = item[name].to(target, non_blocking=True)
        else:
            tensor = torch.empty(expected.shape, dtype=expected.dtype, device=target)
        if tp_group.size() > 1:
            dist.broadcast(tensor, dist.get_global_rank(tp_group, 0), group=tp_group)
        batch[name] = tensor
    return batch

"""A micro-batch for this rank: the first tensor-parallel rank reads, the others receive.

Shapes: ``b`` micro-batch size, ``s`` sequence length.  Collective over the tensor-parallel group,
one broadcast a tensor, in the order of the table.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core import device, parallel_state
from megatron.training import global_vars
from megatron.training.config.run import RunConfig

_DTYPES = {
    "tokens": torch.int64,
    "labels": torch.int64,
    "loss_mask": torch.float32,
    "attention_mask": torch.bool,
    "position_ids": torch.int64,
}


def load_batch(
    data_iterator: Iterator[dict[str, Tensor]] | None,
    config: RunConfig,
    tp_group: dist.ProcessGroup,
    *,
    is_first_stage: bool = True,
    is_last_stage: bool = True,
) -> dict[str, Tensor | None]:
    """tokens, labels, loss_mask, position_ids [b, s]; attention_mask [b, 1, s, s] or None.

    None is what the pipeline stage does not need; one that needs nothing reads nothing.
    """
    target = device.current()
    b, s = config.training.micro_batch_size, config.data.seq_length
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(_DTYPES, (b, s))
    shapes["attention_mask"] = (b, 1, s, s)
    # A mask that is causal and no more is left out: attention is causal without it, and faster.
    is_needed = dict.fromkeys(_DTYPES, config.data.reset_attention_mask)
    is_needed |= dict.fromkeys(("tokens", "position_ids"), is_first_stage)
    is_needed["tokens"] |= is_last_stage and config.model.mtp_num_layers is not None
    is_needed |= dict.fromkeys(("labels", "loss_mask"), is_last_stage)
    batch: dict[str, Tensor | None] = dict.fromkeys(_DTYPES)
    reads = tp_group.rank() == 0 and any(is_needed.values())
    item = next(data_iterator) if reads and data_iterator is not None else {}
    for key, dtype in _DTYPES.items():
        if not is_needed[key]:
            continue
        if reads:
            tensor = item[key].to(target, non_blocking=True)
        else:
            tensor = torch.empty(shapes[key], dtype=dtype, device=target)
        if tp_group.size() > 1:
            dist.broadcast(tensor, dist.get_global_rank(tp_group, 0), group=tp_group)
        batch[key] = tensor
    return batch


def get_batch_on_this_tp_rank(data_iterator: Any) -> dict[str, Tensor | None]:
    """`load_batch` for scripts that pass nothing but the iterator."""
    run = global_vars.get_run()
    return load_batch(
        data_iterator,
        run.config,
        parallel_state.current().tp,
        is_first_stage=0 in run.stages,
        is_last_stage=run.has_loss,
    )

"""Process groups of one rank, without starting torch.distributed."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from torch.distributed import ProcessGroup

from megatron.core.parallel.process_groups_config import ProcessGroupCollection, make_grids
from megatron.core.transformer.transformer_config import TransformerConfig


def one_rank() -> ProcessGroup:
    """Return a process group of size 1."""
    return ProcessGroup(0, 1)


def one_process_groups() -> ProcessGroupCollection:
    """Return process groups with every parallel size 1."""
    group = one_rank()
    dense, expert = make_grids(1)
    grids = {"dense_grid": dense, "expert_grid": expert}
    names = {f.name for f in fields(ProcessGroupCollection)} - grids.keys()
    return ProcessGroupCollection(**dict.fromkeys(names, group), **grids)


_FUSIONS = (
    "apply_rope_fusion",
    "bias_dropout_fusion",
    "gradient_accumulation_fusion",
    "masked_softmax_fusion",
)


def tiny_config(**changes: Any) -> TransformerConfig:
    """Return a config of 2 layers, hidden size 32, 4 heads, no dropout, with ``changes``.

    Functions are fused, as on the command line.  Groups may have other sizes than the fields.
    """
    values: dict[str, Any] = {
        **dict.fromkeys(_FUSIONS, True),
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }
    return TransformerConfig.unchecked(**values | changes)

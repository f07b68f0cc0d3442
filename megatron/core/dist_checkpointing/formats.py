"""The formats that are written, by the names of ``--ckpt-format``."""

from __future__ import annotations

from megatron.core.dist_checkpointing.foreign.torch_dist_writer import TORCH_DIST
from megatron.core.dist_checkpointing.foreign.torch_ranks_writer import TORCH
from megatron.core.dist_checkpointing.format import SAFETENSORS_DIST, Format

FORMATS: dict[str, Format] = {f.name: f for f in (SAFETENSORS_DIST, TORCH_DIST, TORCH)}

"""The formats that are written, by the names of ``--ckpt-format``."""

from __future__ import annotations

from megatron.core.dist_checkpointing.foreign.torch_dcp_writer import FSDP_DTENSOR, TORCH_DCP
from megatron.core.dist_checkpointing.foreign.torch_dist_writer import TORCH_DIST
from megatron.core.dist_checkpointing.foreign.torch_ranks_writer import TORCH
from megatron.core.dist_checkpointing.format import SAFETENSORS_DIST, Format

_ALL = (SAFETENSORS_DIST, TORCH_DIST, TORCH, TORCH_DCP, FSDP_DTENSOR)
FORMATS: dict[str, Format] = {format.name: format for format in _ALL}

"""Defaults that differ from those of Megatron-LM, and the reasons.

docs/differences.md shows this table.
"""

from __future__ import annotations

# dest -> reason
CHANGED_DEFAULTS: dict[str, str] = {
    "ckpt_format": (
        "safetensors_dist loads in any layout, optimizer included, holds no pickle and is written "
        "so that a kill at any moment leaves the previous checkpoint whole"
    ),
    "distributed_backend": "nccl on GPUs and gloo on CPUs, so that a CPU run needs no flag",
}

"""How mbridge builds the model of tools/dev/lib/library_bridges.py."""

from __future__ import annotations

from pathlib import Path

import torch
from mbridge import AutoBridge

from tools.dev.lib.library_models import dtype_of
from tools.dev.lib.library_steps import Bridged, done


def build(path: Path, tp: int, pp: int) -> Bridged:
    """Return the model with the weights of the checkpoint."""
    dtype = dtype_of(path.name)
    bridge = AutoBridge.from_pretrained(path, dtype=dtype)
    if hasattr(bridge.hf_config, "n_routed_experts"):  # transformers does not move the bias
        bridge.set_extra_args(moe_router_bias_update_rate=0.0)
    chunks = bridge.get_model(bf16=dtype == torch.bfloat16, wrap_with_ddp=True)
    done("build")
    bridge.load_weights(chunks, str(path))
    return Bridged(
        chunks, lambda: bridge.export_weights(chunks), lambda to: bridge.save_weights(chunks, to)
    )

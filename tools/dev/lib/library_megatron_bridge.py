"""How Megatron-Bridge builds the model of tools/dev/lib/library_bridges.py."""

from __future__ import annotations

from pathlib import Path

import torch

from megatron.bridge import AutoBridge
from megatron.bridge.training.config import DistributedDataParallelConfig
from tools.dev.lib.library_steps import Bridged, done


def build(path: Path, tp: int, pp: int) -> Bridged:
    """Return the model with the weights of the checkpoint."""
    bridge = AutoBridge.from_hf_pretrained(str(path))
    provider = bridge.to_megatron_provider(load_weights=True)
    provider.tensor_model_parallel_size = tp
    provider.pipeline_model_parallel_size = pp
    provider.sequence_parallel = tp > 1
    provider.params_dtype = provider.pipeline_dtype = torch.float32
    provider.bf16 = provider.fp16 = False
    provider.gradient_accumulation_fusion = False
    provider.moe_router_bias_update_rate = 0.0  # transformers does not balance experts
    provider.moe_aux_loss_coeff = 0.0
    provider.cuda_graph_impl = "none"  # a field of releases after v0.14, which the provider reads
    provider.finalize()
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    ddp.finalize()
    chunks = provider.provide_distributed_model(ddp_config=ddp, wrap_with_ddp=True)
    done("build")
    return Bridged(
        chunks,
        lambda: bridge.export_hf_weights(chunks, cpu=True, show_progress=False),
        lambda to: bridge.save_hf_pretrained(chunks, to),
    )

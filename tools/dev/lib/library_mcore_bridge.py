"""How mcore-bridge, of ms-swift, builds the model of tools/dev/lib/library_bridges.py."""

from __future__ import annotations

from pathlib import Path

import torch
from mcore_bridge import ModelConfig, get_mcore_model, hf_to_mcore_config
from transformers import AutoConfig

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from tools.dev.lib.library_steps import Bridged, done


def build(path: Path, tp: int, pp: int) -> Bridged:
    """Return the model with the weights of the checkpoint."""
    config = ModelConfig(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        sequence_parallel=tp > 1,
        params_dtype=torch.float32,
        **hf_to_mcore_config(AutoConfig.from_pretrained(path)),
    )
    models = get_mcore_model(config)
    done("build")
    bridge = config.bridge
    bridge.load_weights(models, str(path))
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True)
    chunks = [DistributedDataParallel(config, ddp, model) for model in models]
    return Bridged(
        chunks, lambda: bridge.export_weights(models), lambda to: bridge.save_weights(models, to)
    )

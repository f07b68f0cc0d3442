"""Check of mcore-bridge: python -m tools.dev.lib.library_mcore_bridge MODEL FOLDER [TP PP].

It is what ms-swift trains with.  Its modules import Transformer Engine, for which there is a
stand-in without a GPU.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from tools.dev.lib import emulated_cuda, emulated_transformer_engine
from tools.dev.lib.library_models import Reference, differing
from tools.dev.lib.library_steps import Training, done, start


def main(model_name: str, folder: Path, tp: int = 1, pp: int = 1) -> None:
    """Build, load, compare, train, save, load and export."""
    path = folder / model_name
    reference = Reference(path)  # first: what follows replaces functions that transformers calls
    emulated_cuda.emulate()
    emulated_transformer_engine.install()
    from mcore_bridge import ModelConfig, get_mcore_model, hf_to_mcore_config
    from transformers import AutoConfig

    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    start(tp, pp)
    done("import")
    values = hf_to_mcore_config(AutoConfig.from_pretrained(path))
    config = ModelConfig(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        sequence_parallel=tp > 1,
        params_dtype=torch.float32,
        **values,
    )
    models = get_mcore_model(config)
    done("build")
    bridge = config.bridge
    bridge.load_weights(models, str(path))
    done("load")
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True)
    chunks = [DistributedDataParallel(config, ddp, model) for model in models]

    @torch.no_grad()
    def exported() -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in bridge.export_weights(models)}

    different = differing(path, exported())
    if different:
        raise ValueError(f"exported tensors differ: {different}")
    done("export")
    training = Training(chunks, reference, exported)
    training.compare_logits()
    training.take_steps()
    training.save_and_load(folder / f"checkpoint_{model_name}_{tp}_{pp}")
    bridge.save_weights(models, str(folder / f"exported_{model_name}_{tp}_{pp}"))
    done("write files")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:]))

"""Check of Megatron-Bridge: python -m tools.dev.lib.library_megatron_bridge MODEL FOLDER [TP PP].

Its modules import Transformer Engine, for which there is a stand-in without a GPU.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from tools.dev.lib import emulated_cuda, emulated_transformer_engine, supplied_names
from tools.dev.lib.library_models import Reference, differing
from tools.dev.lib.library_steps import Training, done, start

_CORE = "megatron.core"
# ModelOpt, and names of releases after v0.14, that its modules import at once.
SUPPLIED = (
    f"{_CORE}.post_training.modelopt.gpt.model_specs:get_gpt_modelopt_spec",
    f"{_CORE}.post_training.modelopt.mamba.model_specs:get_mamba_stack_modelopt_spec",
    f"{_CORE}.models.gpt.experimental_attention_variant_module_specs:"
    "get_transformer_block_with_experimental_attention_variant_spec",
    f"{_CORE}.transformer.enums:CudaGraphScope",
    f"{_CORE}.tokenizers:MegatronTokenizer",
)


def main(model_name: str, folder: Path, tp: int = 1, pp: int = 1) -> None:
    """Build, load, compare, train, save, load and export."""
    emulated_cuda.emulate()
    emulated_transformer_engine.install()
    supplied_names.supply(SUPPLIED)
    from megatron.bridge import AutoBridge
    from megatron.bridge.training.config import DistributedDataParallelConfig

    start(tp, pp)
    done("import")
    path = folder / model_name
    bridge = AutoBridge.from_hf_pretrained(str(path))
    provider = bridge.to_megatron_provider(load_weights=True)
    provider.tensor_model_parallel_size = tp
    provider.pipeline_model_parallel_size = pp
    provider.sequence_parallel = tp > 1
    provider.params_dtype = provider.pipeline_dtype = torch.float32
    provider.bf16 = provider.fp16 = False
    provider.gradient_accumulation_fusion = False
    provider.cuda_graph_impl = "none"  # a field of releases after v0.14, which the provider reads
    provider.finalize()
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    ddp.finalize()
    chunks = provider.provide_distributed_model(ddp_config=ddp, wrap_with_ddp=True)
    done("build and load")

    @torch.no_grad()
    def exported() -> dict[str, torch.Tensor]:
        weights = bridge.export_hf_weights(chunks, cpu=True, show_progress=False)
        return {name: tensor.clone() for name, tensor in weights}

    different = differing(path, exported())
    if different:
        raise ValueError(f"exported tensors differ: {different}")
    done("export")
    training = Training(chunks, Reference(path), exported)
    training.compare_logits()
    training.take_steps()
    training.save_and_load(folder / f"checkpoint_{model_name}_{tp}_{pp}")
    bridge.save_hf_pretrained(chunks, str(folder / f"exported_{model_name}_{tp}_{pp}"))
    done("write files")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:]))

"""Export the weights of a small GPT for several ranks of TensorRT-LLM, in one process on the CPU.

    python examples/export/trtllm_export/single_device_export/gpt_single_device_cpu_export.py \\
        --output DIR --tensor-parallel 2 --pipeline-parallel 2

A trained checkpoint is converted by tools/checkpoint/convert.py --format trtllm.  NVIDIA deprecates
this form: current versions of TensorRT-LLM load Hugging Face folders (--format hf).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[4]))  # installed or not

from megatron.core.export.data_type import DataType
from megatron.core.export.export_config import ExportConfig
from megatron.core.export.model_type import ModelType
from megatron.core.export.trtllm.trtllm_helper import TRTLLMHelper, save_rank
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

VOCAB_SIZE = 96
SEQUENCE_LENGTH = 64


def small_config(tp: int = 1, pp: int = 1) -> TransformerConfig:
    """Return the configuration of the model on ``tp`` times ``pp`` ranks."""
    return TransformerConfig(
        num_layers=4,
        hidden_size=64,
        num_attention_heads=4,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        pipeline_dtype=torch.float32,
    )


def small_model(config: TransformerConfig, vocab_size: int = VOCAB_SIZE, **stage: Any) -> GPTModel:
    """Build the model, or a ``stage``; the weights depend on the seed, not on the layout."""
    torch.manual_seed(1234)
    return GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size,
        SEQUENCE_LENGTH,
        **stage,
    )


def helper_of(config: TransformerConfig) -> TRTLLMHelper:
    """Return the helper of the model."""
    return TRTLLMHelper(
        transformer_config=config,
        model_type=ModelType.gpt,
        max_position_embeddings=SEQUENCE_LENGTH,
        activation="gelu",
    )


def main(argv: list[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="new folder to write")
    parser.add_argument("--tensor-parallel", type=int, default=2, help="ranks that share a layer")
    parser.add_argument("--pipeline-parallel", type=int, default=1, help="stages")
    options = parser.parse_args(argv)
    config = small_config()
    weights, configs = helper_of(config).get_trtllm_pretrained_config_and_model_weights(
        model_state_dict=small_model(config).state_dict(),
        dtype=DataType.bfloat16,
        export_config=ExportConfig(
            inference_tp_size=options.tensor_parallel,
            inference_pp_size=options.pipeline_parallel,
            use_parallel_embedding=True,
        ),
    )
    options.output.mkdir(parents=True)
    for of_rank, its_config in zip(weights, configs, strict=True):
        save_rank(options.output, of_rank, its_config)
    print(f"wrote the files of {len(weights)} ranks to {options.output}")


if __name__ == "__main__":
    main()

"""Write a checkpoint of TensorRT-LLM: config.json and a file for each rank (--format trtllm).

One tensor is in memory at a time.  NVIDIA deprecates this form: current versions of TensorRT-LLM
load Hugging Face folders.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.core.config.errors import CheckpointError
from megatron.core.config.value_types import JsonObject
from megatron.core.dist_checkpointing.safetensors_file import LazyTensor
from megatron.core.dist_checkpointing.validation import AMAX_HISTORY
from megatron.core.export.trtllm.trtllm_helper import TRTLLMHelper, save_rank
from megatron.core.export.trtllm.trtllm_layers import (
    TRT_MODEL_TYPE_STRING,
    DataType,
    ExportConfig,
    ModelType,
)
from megatron.training.config.run import RunConfig
from megatron.training.conversion.shape import ModelShape, shape_of
from megatron.training.models.registry import model_kind_of

FORMAT = "trtllm"
NOTE = (
    "note: NVIDIA deprecates TensorRT-LLM's own checkpoints; current versions load a Hugging Face "
    "folder (--format hf)"
)
_FLAG = f"--format {FORMAT}"
_EMBEDDING = "embedding.word_embeddings.weight"
_OUTPUT = "output_layer.weight"
# Values that config.json or the sizes of the weights express; others must be as `_NEEDED` says,
# or have the default of `ModelShape`.
_TAKEN = (
    "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels "
    "max_position_embeddings vocab_size norm_epsilon apply_layernorm_1p is_tied rotary_base "
    "rotary_percent rotary_seq_len_interpolation_factor rope_scaling_factor"
).split()
_OF_EXPERTS = "num_experts expert_layers moe_ffn_hidden_size moe_router_topk".split()
_GPT = ModelType.gpt, ModelType.gptnext, ModelType.starcoder, ModelType.falcon
_POSITIONS = ("learned_absolute", "rope", "alibi")
_LLAMA3: JsonObject = {
    **{"type": "llama3", "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 8192,
}


def write_ranks(
    folder: Path,
    run: RunConfig,
    weights: Mapping[str, LazyTensor],
    vocab_size: int,
    family: str | None,
    export: ExportConfig,
) -> str:
    """Write the files of all ranks into ``folder``; return the architecture.

    ``family``: a name of `ModelType`; None: the one that fits.  Raises CheckpointError for a model
    that TensorRT-LLM's class does not compute, ConfigError for sizes that do not divide it.
    """
    helper = _helper(run, vocab_size, family)
    tensors = {n: t for n, t in weights.items() if not n.endswith(AMAX_HISTORY)}
    tensors.setdefault(_OUTPUT, tensors[_EMBEDDING])  # versions differ in how they tie it
    dtype = DataType[str(tensors[_EMBEDDING].dtype).removeprefix("torch.")]
    for of_rank, config in helper.ranks(tensors, dtype, export, vocab_size):
        save_rank(folder, of_rank, config)
    return TRT_MODEL_TYPE_STRING[helper.model_type]


def check(run: RunConfig) -> None:
    """Raise CheckpointError unless the model is a language model that reads text alone."""
    kind = model_kind_of(run)
    if run.language_model.model_kind != "gpt" or run.preference.reward_model:
        what = "a reward model" if run.preference.reward_model else kind.title
        raise CheckpointError(
            f"{_FLAG}: the model is {what}, and only GPT models are converted: use --format hf"
        )


def _helper(run: RunConfig, vocab_size: int, family: str | None) -> TRTLLMHelper:
    shape = shape_of(run, vocab_size)
    model_type = _model_type(shape, family)
    lacks = list(shape.differences(_supported(shape, model_type)))
    if lacks:
        raise CheckpointError(
            f"{_FLAG}: TensorRT-LLM's {TRT_MODEL_TYPE_STRING[model_type]} ({model_type.name}) has "
            f"no {', '.join(lacks[:4])}: use --format hf"
        )
    activation = {"gelu_tanh": "gelu", "squared_relu": "squared-relu"}.get(
        shape.activation, shape.activation
    )
    if shape.is_gated:
        activation = {"silu": "swiglu", "gelu": "geglu"}[activation]
    helper = TRTLLMHelper(
        transformer_config=run.model,
        model_type=model_type,
        position_embedding_type=shape.position_embedding_type,
        max_position_embeddings=shape.max_position_embeddings,
        rotary_percentage=shape.rotary_percent,
        rotary_base=shape.rotary_base,
        activation=activation,
        seq_len_interpolation_factor=shape.rotary_seq_len_interpolation_factor,
    )
    if shape.rope_scaling_factor is not None:
        helper.config_values["rotary_scaling"] = {**_LLAMA3, "factor": shape.rope_scaling_factor}
    return helper


def _model_type(shape: ModelShape, family: str | None) -> ModelType:
    if family is not None:
        names = [each.name for each in ModelType if each is not ModelType.nemotron_nas]
        if family not in names:
            raise CheckpointError(f"--family {family}: {_FLAG} has {', '.join(names)}")
        return ModelType[family]
    if shape.num_experts:
        return ModelType.mixtral
    if shape.normalization == "LayerNorm":
        return ModelType.gpt
    return ModelType.llama if shape.activation == "silu" else ModelType.gemma


def _supported(shape: ModelShape, model_type: ModelType) -> ModelShape:
    """Return the model nearest to ``shape`` that TensorRT-LLM's class computes."""
    values: dict[str, Any] = {name: getattr(shape, name) for name in _TAKEN}
    values |= {"windows": (None,) * shape.num_layers, "softmax_scale": shape.kv_channels**-0.5}
    if model_type in _GPT:
        place = shape.position_embedding_type
        has_bias = shape.add_bias_linear
        values |= {
            "normalization": "LayerNorm",
            "is_gated": False,
            "activation": shape.activation if shape.activation != "quick_gelu" else "gelu",
            "add_bias_linear": has_bias,
            "add_qkv_bias": has_bias,
            "position_embedding_type": place if place in _POSITIONS else "rope",
        }
    elif model_type is ModelType.gemma:
        is_gelu = shape.activation in ("gelu", "gelu_tanh")
        values |= {"activation": shape.activation if is_gelu else "gelu"}
        values |= {"embedding_scale": shape.hidden_size**0.5}
    elif model_type is ModelType.mixtral:
        values |= {name: getattr(shape, name) for name in _OF_EXPERTS}
        values |= {
            "expert_layers": (True,) * shape.num_layers,
            "moe_router_score_function": "softmax",
        }
    return ModelShape(**values)

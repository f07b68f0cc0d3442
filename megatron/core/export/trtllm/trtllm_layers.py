"""Names of TensorRT-LLM's weights, models and settings, and their counterparts in Megatron Core.

A name without a layer's number, such as ``transformer.layers.mlp.fc.weight``, stands for all
layers; files have the number behind ``layers``.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from megatron.core.config.errors import ConfigError

T = TypeVar("T")
_PREFIX = "transformer.layers."
_EXPERT = ".expert"  # at the end of names of weights that hold all experts of a layer


DataType = Enum("DataType", "bfloat16 float16 float32")
ModelType = Enum("ModelType", "gpt gptnext llama falcon starcoder mixtral gemma nemotron_nas")
TRT_MODEL_TYPE_STRING = {
    **dict.fromkeys(ModelType, "GPTForCausalLM"),
    **dict.fromkeys((ModelType.llama, ModelType.mixtral), "LlamaForCausalLM"),
    ModelType.falcon: "FalconForCausalLM",
    ModelType.gemma: "GemmaForCausalLM",
    ModelType.nemotron_nas: "DeciLMForCausalLM",
}


@dataclass
class ExportConfig:
    """Layout of the ranks that TensorRT-LLM runs.

    ``use_parallel_embedding`` shards the embeddings over the tensor-parallel ranks.
    """

    inference_tp_size: int = 1
    inference_pp_size: int = 1
    use_parallel_embedding: bool = False
    use_embedding_sharing: bool | None = None

    def __post_init__(self) -> None:
        """Warn about ``use_embedding_sharing``, which has no effect."""
        if self.use_embedding_sharing is not None:
            warnings.warn(
                "use_embedding_sharing has no effect: pass share_embeddings_and_output_weights to "
                "TRTLLMHelper",
                DeprecationWarning,
                stacklevel=3,
            )


class TRTLLMLayers(Enum):
    """Names of TensorRT-LLM's weights, without numbers of layers."""

    position_embedding = "transformer.position_embedding.weight"
    vocab_embedding = "transformer.vocab_embedding.weight"
    lm_head = "lm_head.weight"
    final_layernorm_weight = "transformer.ln_f.weight"
    final_layernorm_bias = "transformer.ln_f.bias"
    input_layernorm_weight = f"{_PREFIX}input_layernorm.weight"
    input_layernorm_bias = f"{_PREFIX}input_layernorm.bias"
    attention_qkv_weight = f"{_PREFIX}attention.qkv.weight"
    attention_qkv_bias = f"{_PREFIX}attention.qkv.bias"
    attention_dense_weight = f"{_PREFIX}attention.dense.weight"
    attention_dense_bias = f"{_PREFIX}attention.dense.bias"
    attention_linear_weight = f"{_PREFIX}attention.weight"
    mlp_fc_weight = f"{_PREFIX}mlp.fc.weight"
    mlp_fc_bias = f"{_PREFIX}mlp.fc.bias"
    post_layernorm_weight = f"{_PREFIX}post_layernorm.weight"
    post_layernorm_bias = f"{_PREFIX}post_layernorm.bias"
    mlp_projection_weight = f"{_PREFIX}mlp.proj.weight"
    mlp_projection_bias = f"{_PREFIX}mlp.proj.bias"
    ffn_fc_weight = f"{_PREFIX}ffn.fc.weight"
    ffn_projection_weight = f"{_PREFIX}ffn.proj.weight"
    ffn_linear_weight = f"{_PREFIX}ffn.weight"
    mlp_router_weight = f"{_PREFIX}mlp.router.weight"
    mlp_fc_weight_mixture_of_experts = f"{_PREFIX}mlp.fc.weight{_EXPERT}"
    mlp_projection_weight_mixture_of_experts = f"{_PREFIX}mlp.proj.weight{_EXPERT}"

    @staticmethod
    def return_layer_name_and_number(layer_name: str) -> tuple[str, int | None]:
        """Return a name without the number of its layer, and the number, None without one."""
        found = re.fullmatch(r"(.*\blayers\.)(\d+)\.(.*)", layer_name)
        return (layer_name, None) if found is None else (found[1] + found[3], int(found[2]))

    @staticmethod
    def rename_input_layer_names_to_trtllm_layer_names(
        model_state_dict: Mapping[str, T],
        trtllm_conversion_dict: Mapping[str, TRTLLMLayers],
        state_dict_split_by_layer_numbers: bool = True,
    ) -> dict[str, T]:
        """Return the entries by TensorRT-LLM's names, without extra states.

        ``state_dict_split_by_layer_numbers``: names have numbers of layers.  Raises ConfigError for
        a name that the conversion dict lacks.
        """
        renamed = {}
        for name, value in model_state_dict.items():
            if name.endswith("_extra_state"):
                continue
            plain = name
            number = None
            if state_dict_split_by_layer_numbers:
                plain, number = TRTLLMLayers.return_layer_name_and_number(name)
            if plain not in trtllm_conversion_dict:
                raise ConfigError(
                    f"TensorRT-LLM has no place for {name}: give trtllm_conversion_dict an entry "
                    f"for {plain}, or export the model to the Hugging Face form"
                )
            renamed[numbered(trtllm_conversion_dict[plain].value, number)] = value
        return renamed


NON_TRANSFORMER_LAYERS_NAMES = [
    layer.value for layer in TRTLLMLayers if not layer.value.startswith(_PREFIX)
]


def get_layer_name_without_prefix(layer: TRTLLMLayers) -> str:
    """Return the name within a layer."""
    return str(layer.value).removeprefix(_PREFIX)


def numbered(name: str, number: int | None) -> str:
    """Return the name of a weight of layer ``number``."""
    return name if number is None else name.replace(_PREFIX, f"{_PREFIX}{number}.", 1)


DEFAULT_CONVERSION_DICT: dict[str, TRTLLMLayers] = {
    "embedding.word_embeddings.weight": TRTLLMLayers.vocab_embedding,
    "embedding.position_embeddings.weight": TRTLLMLayers.position_embedding,
    "output_layer.weight": TRTLLMLayers.lm_head,
    "decoder.layers.mlp.router.weight": TRTLLMLayers.mlp_router_weight,
    "decoder.layers.mlp.experts.experts.linear_fc1.weight": (
        TRTLLMLayers.mlp_fc_weight_mixture_of_experts
    ),
    "decoder.layers.mlp.experts.experts.linear_fc2.weight": (
        TRTLLMLayers.mlp_projection_weight_mixture_of_experts
    ),
}
for _ours, _theirs in {
    "final_layernorm.": "final_layernorm",
    "layers.input_layernorm.": "input_layernorm",
    "layers.self_attention.linear_qkv.layer_norm_": "input_layernorm",  # of Transformer Engine
    "layers.self_attention.linear_qkv.": "attention_qkv",
    "layers.self_attention.linear_proj.": "attention_dense",
    "layers.pre_mlp_layernorm.": "post_layernorm",
    "layers.mlp.linear_fc1.layer_norm_": "post_layernorm",
    "layers.mlp.linear_fc1.": "mlp_fc",
    "layers.mlp.linear_fc2.": "mlp_projection",
}.items():
    for _kind in ("weight", "bias"):
        DEFAULT_CONVERSION_DICT[f"decoder.{_ours}{_kind}"] = TRTLLMLayers[f"{_theirs}_{_kind}"]

# Replaces entries of the default for models that architecture search has shaped layer by layer.
NEMOTRON_NAS_CONVERSION_DICT: dict[str, TRTLLMLayers] = {
    "decoder.layers.self_attention.weight": TRTLLMLayers.attention_linear_weight,
    "decoder.layers.mlp.weight": TRTLLMLayers.ffn_linear_weight,
    "decoder.layers.mlp.linear_fc1.weight": TRTLLMLayers.ffn_fc_weight,
    "decoder.layers.mlp.linear_fc2.weight": TRTLLMLayers.ffn_projection_weight,
}

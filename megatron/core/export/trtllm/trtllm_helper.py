"""Megatron Core's helper of the export to TensorRT-LLM, and the files of its checkpoints."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from megatron.core.config.errors import ConfigError
from megatron.core.config.value_types import JsonObject
from megatron.core.dist_checkpointing.manifest import write_text
from megatron.core.dist_checkpointing.safetensors_file import LazyTensor, write_file
from megatron.core.export.trtllm.trtllm_layers import (
    DEFAULT_CONVERSION_DICT,
    NEMOTRON_NAS_CONVERSION_DICT,
    TRT_MODEL_TYPE_STRING,
    DataType,
    ExportConfig,
    ModelType,
)
from megatron.core.export.trtllm.trtllm_weights import (
    GATED,
    DistributedTRTLLMModelWeightsConverter,
    Names,
    RankMapping,
    SingleDeviceTRTLLMModelWeightsConverter,
    WeightLayout,
    as_lazy,
    pad_vocab_size,
    rank_tensors,
)
from megatron.core.transformer.transformer_config import TransformerConfig

_RENORMALIZE = 1  # the weights of the chosen experts sum to 1


class TRTLLMConfig(SimpleNamespace):
    """config.json of TensorRT-LLM as attributes; ``mapping`` is the rank that it is for."""

    mapping: RankMapping

    def to_dict(self) -> JsonObject:
        """Return the content of config.json, which all ranks share."""
        tp = self.mapping.tp_size
        pp = self.mapping.pp_size
        return {**vars(self), "mapping": {"world_size": tp * pp, "tp_size": tp, "pp_size": pp}}


# Classes of the configuration of each model; tensorrt_llm builds its own from config.json.
TRT_MODEL_CONFIG = dict.fromkeys(ModelType, TRTLLMConfig)


def save_rank(folder: Path, weights: Mapping[str, Any], config: TRTLLMConfig) -> None:
    """Write the tensors of one rank, and config.json on rank 0, into an existing folder."""
    rank = config.mapping.rank
    tensors = [replace(tensor, name=name) for name, tensor in as_lazy(weights).items()]
    write_file(folder / f"rank{rank}.safetensors", tensors, {"format": "pt"}, step=0)
    if rank == 0:
        write_text(folder / "config.json", json.dumps(config.to_dict(), indent=2) + "\n")


class TRTLLMEngineBuilder:
    """Megatron Core's name for building an engine, which TensorRT-LLM's own program does."""

    @staticmethod
    def build_and_save_engine(engine_dir: str, *_: Any, **__: Any) -> None:
        """Raise ConfigError with the commands that build the engine."""
        raise ConfigError(
            f"build_and_save_engine {engine_dir}: TensorRT-LLM builds engines itself: write the "
            "files with megatron.core.export.trtllm.trtllm_helper.save_rank(), then run "
            f"trtllm-build --checkpoint_dir DIR --output_dir {engine_dir}, of tensorrt_llm"
        )


class TRTLLMHelper:
    """Converts a model's weights and configuration to TensorRT-LLM's form."""

    build_and_save_engine = staticmethod(TRTLLMEngineBuilder.build_and_save_engine)

    def __init__(
        self,
        *,
        transformer_config: TransformerConfig,
        model_type: ModelType,
        trtllm_conversion_dict: Names = {},  # noqa: B006  never changed
        position_embedding_type: str = "learned_absolute",
        max_position_embeddings: int | None = None,
        rotary_percentage: float = 1.0,
        rotary_base: float = 10000,
        rope_scaling_factor: float = 8.0,
        moe_tp_mode: int = 2,
        multi_query_mode: bool = False,
        activation: str = "gelu",
        seq_len_interpolation_factor: float | None = None,
        moe_renorm_mode: int | None = None,
        share_embeddings_and_output_weights: bool = False,
    ) -> None:
        """``trtllm_conversion_dict``: name in Megatron Core -> layer, beside the default entries.

        ``activation`` is TensorRT-LLM's name.  ``multi_query_mode`` is not read: fewer query groups
        than ranks are always repeated.
        """
        is_nas = model_type is ModelType.nemotron_nas
        self.trtllm_conversion_dict = {
            **DEFAULT_CONVERSION_DICT,
            **(NEMOTRON_NAS_CONVERSION_DICT if is_nas else {}),
            **trtllm_conversion_dict,
        }
        self.transformer_config = transformer_config
        self.model_type = model_type
        self.activation = activation
        is_rotated = position_embedding_type == "rope"
        rotary: JsonObject | None = None
        if is_nas:
            rotary = {"type": "llama3", "factor": rope_scaling_factor}
        elif seq_len_interpolation_factor is not None:
            rotary = {"type": "linear", "factor": float(seq_len_interpolation_factor)}
        self.config_values: JsonObject = {
            "position_embedding_type": "rope_gpt_neox" if is_rotated else position_embedding_type,
            "max_position_embeddings": max_position_embeddings,
            "rotary_pct": rotary_percentage,
            "rotary_base": rotary_base,
            "rotary_scaling": rotary,
            "moe_tp_mode": moe_tp_mode,
            "moe_normalization_mode": moe_renorm_mode or _RENORMALIZE,
            "share_embedding_table": share_embeddings_and_output_weights,
        }

    def get_trtllm_pretrained_config_and_model_weights(
        self,
        model_state_dict: Mapping[str, Tensor],
        dtype: DataType,
        export_config: ExportConfig | None = None,
        on_device_distributed_conversion: bool = False,
        vocab_size: int | None = None,
        gpus_per_node: int | None = None,
        state_dict_split_by_layer_numbers: bool = True,
        fp8_quantized: bool = False,
        fp8_kvcache: bool = False,
    ) -> tuple[Any, Any]:
        """Return weights and configurations: lists with an entry for each rank of inference.

        With ``on_device_distributed_conversion``, which needs ``vocab_size`` (without padding), the
        layout is that of the run, ``model_state_dict`` is this rank's, and so are the results:
        weights and one configuration.  Collective over the tensor-parallel group then.
        ``gpus_per_node`` is not read.  Raises ConfigError.
        """
        if fp8_quantized or fp8_kvcache:
            raise ConfigError(
                "fp8_quantized and fp8_kvcache: export unquantized weights, or quantized ones in "
                "the Hugging Face form (tools/checkpoint/convert.py --format hf)"
            )
        if not on_device_distributed_conversion:
            ranks = list(
                self.ranks(
                    model_state_dict,
                    dtype,
                    export_config or ExportConfig(),
                    vocab_size,
                    state_dict_split_by_layer_numbers,
                )
            )
            weights = [{t.name: t.make() for t in tensors.values()} for tensors, _ in ranks]
            return weights, [config for _, config in ranks]
        if export_config is not None or vocab_size is None:
            raise ConfigError(
                "on_device_distributed_conversion: pass vocab_size, and no export_config: the "
                "layout is that of the run"
            )
        is_falcon = self.model_type is ModelType.falcon
        own = DistributedTRTLLMModelWeightsConverter(
            self.transformer_config, dtype, activation=self.activation, is_falcon=is_falcon
        )
        own.convert(model_state_dict, self.trtllm_conversion_dict, vocab_size)
        return own.trtllm_model_weights, self._config(own.layout, own.mapping)

    def ranks(
        self,
        weights: Mapping[str, Any],
        dtype: DataType,
        export: ExportConfig,
        vocab_size: int | None = None,
        are_split: bool = True,
    ) -> Iterator[tuple[dict[str, LazyTensor], TRTLLMConfig]]:
        """Yield tensors, which are made when they are used, and configuration of each rank."""
        is_falcon = self.model_type is ModelType.falcon
        whole = SingleDeviceTRTLLMModelWeightsConverter(
            export, self.transformer_config, dtype, activation=self.activation, is_falcon=is_falcon
        )
        whole.convert(weights, self.trtllm_conversion_dict, are_split)
        layout = replace(whole.layout, vocab_size=vocab_size or whole.layout.vocab_size)
        for rank in range(export.inference_tp_size * export.inference_pp_size):
            place = RankMapping(rank, export.inference_tp_size, export.inference_pp_size)
            tensors = {t.name: t for t in rank_tensors(whole.weights, layout, place)}
            yield tensors, self._config(layout, place)

    def _config(self, layout: WeightLayout, place: RankMapping) -> TRTLLMConfig:
        model = self.transformer_config
        experts = model.num_moe_experts or 1
        more: JsonObject = {}
        if self.model_type is ModelType.falcon:
            more = {"new_decoder_architecture": layout.groups > 1, "parallel_attention": True}
        elif self.model_type is ModelType.nemotron_nas:
            described = json.loads(model.heterogeneous_layers_config_encoded_json or "{}")
            more = {"block_configs": described.get("block_configs")}
        return TRTLLMConfig(
            architecture=TRT_MODEL_TYPE_STRING[self.model_type],
            dtype=layout.dtype.name,
            num_hidden_layers=model.num_layers,
            num_attention_heads=model.num_attention_heads,
            num_key_value_heads=layout.groups,
            head_size=model.kv_channels or model.hidden_size // model.num_attention_heads,
            hidden_size=model.hidden_size,
            intermediate_size=layout.ffn_size,
            norm_epsilon=model.layernorm_epsilon,
            vocab_size=pad_vocab_size(layout.vocab_size, place.tp_size),
            hidden_act=self.activation
            if experts > 1
            else GATED.get(self.activation, self.activation),
            use_parallel_embedding=layout.shards_embedding,
            embedding_sharding_dim=0,
            quantization={"quant_algo": None, "kv_cache_quant_algo": None},
            bias=model.add_bias_linear,
            apply_query_key_layer_scaling=False,
            moe_num_experts=experts,
            moe_top_k=model.moe_router_topk,
            logits_dtype="float32",
            mapping=place,
            **self.config_values,
            **more,
        )

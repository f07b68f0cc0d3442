"""Encoders of `transformers` as ours, of any activation: built, and their tensors in memory.

RADIO, SigLIP with its last norm, and a plain ViT, which no program converts, are among them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import torch.nn.functional as F
from torch import Tensor

from megatron.core.activations import openai_gelu, quick_gelu
from megatron.core.models.mimo.submodules.audio import WhisperEncoderModel
from megatron.core.models.multimodal.qwen2_vl_model import Qwen2VLVisionModel
from megatron.core.models.vision.clip_vit_model import CLIPViTModel
from megatron.core.models.vision.radio import RADIOViTModel
from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_local_spec
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.conversion import vision
from megatron.training.conversion.family import Config
from megatron.training.conversion.lazy import as_lazy
from megatron.training.conversion.tensors import Rule
from megatron.training.conversion.vision import (
    CLIP,
    ENCODERS,
    INTERNVIT,
    WHISPER,
    EncoderFamily,
    export_encoder,
    import_encoder,
    names_of_layer,
)

Encoder: TypeAlias = CLIPViTModel | WhisperEncoderModel | Qwen2VLVisionModel | RADIOViTModel

_ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_pytorch_tanh": openai_gelu,
    "quick_gelu": quick_gelu,
}
_RADIO = EncoderFamily(
    subtype="radio",
    fields=(),
    outside={
        "embedder": "embeddings.patch_projection",
        "class_token": "embeddings.cls_register_token",
        "position_embeddings.weight": "embeddings.position_embedding",
    },
    layer={
        "input_layernorm": "norm1",
        "self_attention.linear_qkv": Rule(
            tuple(f"attention.{each}_proj" for each in "qkv"), is_qkv=True
        ),
        "self_attention.linear_proj": "attention.o_proj",
        "pre_mlp_layernorm": "norm2",
        "mlp.linear_fc1": "mlp.fc1",
        "mlp.linear_fc2": "mlp.fc2",
        "post_self_attn_layernorm.weight": "layer_scale1.lambda1",
        "post_mlp_layernorm.weight": "layer_scale2.lambda1",
    },
    layer_prefix="encoder.layer.{}.",
    ignored=("input_conditioner.", "summary_idxs"),  # images are normalized before
)
_VIT = replace(
    INTERNVIT,
    subtype="vit",
    outside={**INTERNVIT.outside, "ln_post": "layernorm"},
    layer=names_of_layer(
        "layernorm_before",
        "attention.q_proj attention.k_proj attention.v_proj",
        *("attention.o_proj", "layernorm_after", "mlp.fc1", "mlp.fc2"),
    ),
    layer_prefix="layers.{}.",
    ignored=("pooler.",),
    has_bias=True,
)
_SIGLIP = replace(CLIP, subtype="siglip", ignored=("head.", "embeddings.position_ids"), unread={})
FAMILIES = ENCODERS | {
    "siglip_vision_model": _SIGLIP,
    "vit": _VIT,
    "radio": _RADIO,
    "whisper": WHISPER,
    "qwen2_vl": ENCODERS["qwen2_vl_vision"],
}
_EPSILON = {"clip": 1e-5, "whisper": 1e-5, "vit": 1e-12}  # others: 1e-6
vision._SHAPES |= {
    "embeddings.cls_register_token": lambda ours: tuple(ours[1:]),
    "embeddings.patch_projection.weight": lambda ours: (ours[0], math.prod(ours[1:])),
    "embeddings.position_embedding": lambda ours: (1, *ours),
}


def _layers_of(config: Config, subtype: str, **changes: Any) -> TransformerConfig:
    """Return the config of the layers that config.json describes."""

    def first(*names: str) -> Any:
        return next(config[name] for name in names if name in config)

    if subtype == "qwen2_vl":  # the width of what the projector returns has the usual name
        config = {**config, "hidden_size": config["embed_dim"]}
    hidden = first("hidden_size", "d_model")
    return TransformerConfig(
        **{
            "num_layers": first("num_hidden_layers", "encoder_layers", "depth"),
            "hidden_size": hidden,
            "num_attention_heads": first(
                "num_attention_heads", "encoder_attention_heads", "num_heads"
            ),
            "ffn_hidden_size": config.get("intermediate_size", config.get("encoder_ffn_dim"))
            or int(hidden * config["mlp_ratio"]),
            "activation_func": _ACTIVATIONS[first("hidden_act", "activation_function")],
            "bias_activation_fusion": False,
            "layernorm_epsilon": config.get("layer_norm_eps", _EPSILON.get(subtype, 1e-6)),
            "normalization": "RMSNorm" if config.get("norm_type") == "rms_norm" else "LayerNorm",
            "attention_dropout": 0.0,
            "hidden_dropout": 0.0,
            "qk_layernorm_full_width": bool(config.get("use_qk_norm")),
            **changes,
        }
    )


def built(config: Config, groups: ProcessGroupCollection, **changes: Any) -> Encoder:
    """Return the encoder of config.json, without weights."""
    subtype = FAMILIES[config["model_type"]].subtype
    layers = _layers_of(config, subtype, **changes)
    scales = subtype in ("radio", "internvit")
    parts = layers, get_vit_layer_with_local_spec(layers, has_layer_scale=scales)
    if subtype == "radio":
        return RADIOViTModel(
            *parts,
            class_token_len=config["num_cls_tokens"] + config["num_registers"],
            patch_dim=config["patch_size"],
            max_img_h=config["max_img_size"],
            max_img_w=config["max_img_size"],
            pg_collection=groups,
        )
    if subtype == "whisper":
        sizes = config["num_mel_bins"], config["max_source_positions"]
        return WhisperEncoderModel(*parts, *sizes, pg_collection=groups)
    if subtype == "qwen2_vl":
        return Qwen2VLVisionModel(*parts, config["patch_size"], pg_collection=groups)
    (height, width), (side, _) = (
        value if isinstance(value, list | tuple) else (value, value)
        for value in (config["image_size"], config["patch_size"])
    )
    is_small = subtype == "internvit" and layers.normalization == "LayerNorm"
    return CLIPViTModel(
        *parts,
        patch_dim=side,
        img_h=height,
        img_w=width,
        model_subtype="internvit300M" if is_small else subtype,
        pg_collection=groups,
    )


def encoder_from_hf(
    model: Encoder, config: Config, tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the tensors of ``model`` from theirs."""
    family = FAMILIES[config["model_type"]]
    found = import_encoder(family, model, config, as_lazy(tensors))
    return {name: tensor.make() for name, tensor in found.items()}


def encoder_to_hf(
    model: Encoder, config: Config, tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return ``tensors``, complete ones under our names, under theirs."""
    family = FAMILIES[config["model_type"]]
    return {
        t.name: t.make() for t in export_encoder(family, model.config, config, as_lazy(tensors))
    }

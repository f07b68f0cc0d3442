"""Tensors of encoders from Hugging Face and back, in memory; RADIO, which no program converts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from megatron.core.models.vision.radio import RADIOViTModel
from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_local_spec
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.training.conversion import vision
from megatron.training.conversion.family import Config
from megatron.training.conversion.lazy import as_lazy
from megatron.training.conversion.tensors import Rule
from megatron.training.conversion.vision import (
    Encoder,
    EncoderFamily,
    build_encoder,
    export_encoder,
    import_encoder,
    layers_of,
)

vision.FAMILIES["radio"] = EncoderFamily(
    subtype="radio",
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
    has_layer_scale=True,
    eps=1e-6,
)
vision._SHAPES |= {
    "embeddings.cls_register_token": lambda ours: tuple(ours[1:]),
    "embeddings.patch_projection.weight": lambda ours: (ours[0], math.prod(ours[1:])),
    "embeddings.position_embedding": lambda ours: (1, *ours),
}


def built(config: Config, groups: ProcessGroupCollection, **changes: Any) -> Encoder:
    """Return the encoder of config.json, without weights."""
    if config["model_type"] != "radio":
        return build_encoder(config, groups, **changes)
    layers = layers_of(config, **changes)
    return RADIOViTModel(
        layers,
        get_vit_layer_with_local_spec(layers, has_layer_scale=True),
        class_token_len=config["num_cls_tokens"] + config["num_registers"],
        patch_dim=config["patch_size"],
        max_img_h=config["max_img_size"],
        max_img_w=config["max_img_size"],
        pg_collection=groups,
    )


def encoder_from_hf(
    model: Encoder, config: Config, tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the tensors of ``model`` from theirs."""
    return {n: t.make() for n, t in import_encoder(model, config, as_lazy(tensors)).items()}


def encoder_to_hf(
    model: Encoder, config: Config, tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return ``tensors``, complete ones under our names, under theirs."""
    return {t.name: t.make() for t in export_encoder(model, config, as_lazy(tensors))}

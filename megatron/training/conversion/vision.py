"""Encoders of images and sound from Hugging Face and back: config.json, tensors bit by bit.

Only the encoder itself is converted: a pooling head or a projection beside it is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch.nn.functional as F
from torch import Tensor

from megatron.core.activations import openai_gelu, quick_gelu
from megatron.core.config.errors import CheckpointError
from megatron.core.models.audio.whisper_encoder import WhisperEncoderModel
from megatron.core.models.vision.clip_vit_model import CLIPViTModel
from megatron.core.models.vision.radio import RADIOViTModel
from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_local_spec
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.conversion.family import Config
from megatron.training.conversion.tensors import Rule

Encoder: TypeAlias = CLIPViTModel | RADIOViTModel | WhisperEncoderModel

_ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_pytorch_tanh": openai_gelu,
    "quick_gelu": quick_gelu,
    "relu": F.relu,
    "silu": F.silu,
}


@dataclass(frozen=True, kw_only=True)
class EncoderFamily:
    """How the tensors of one family are called.  Names stand for a weight and its bias.

    ``outside`` and ``layer``: our name -> theirs; ``layer_prefix``: theirs, {} is the number.
    ``values``: our tensors without ``.weight`` in theirs.  ``ignored``: beginnings of names of what
    does not belong to the encoder.
    """

    subtype: str  # a key of `clip_vit_model.KINDS`, or radio, or whisper
    outside: Mapping[str, str]
    layer: Mapping[str, str]
    layer_prefix: str
    values: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    has_layer_scale: bool = False
    has_key_bias: bool = True
    eps: float = 1e-5  # if config.json has none

    def theirs(self, ours: str) -> tuple[str, ...]:
        """Return their names of our tensor: one, or those of query, key and value."""
        if ours in self.values:
            return (self.values[ours],)
        name = ours
        prefix = ""
        table = self.outside
        if ours.startswith("decoder.layers."):
            _, _, number, name = ours.split(".", 3)
            prefix, table = self.layer_prefix.format(number), self.layer
            if name in self.values:
                return (prefix + self.values[name],)
        module, _, kind = name.rpartition(".")
        if module not in table:
            raise CheckpointError(f"{ours} has no counterpart in a {self.subtype} encoder")
        return tuple(f"{prefix}{each}.{kind}" for each in table[module].split())

    def absent(self, theirs: tuple[str, ...], config: Config) -> tuple[str, ...]:
        """Return which of ``theirs`` are biases of queries, keys or values that they lack."""
        if len(theirs) == 1 or not theirs[0].endswith(".bias"):
            return ()
        if not config.get("attention_bias", config.get("qkv_bias", True)):
            return theirs
        return () if self.has_key_bias else (theirs[1],)


_CLIP_LAYER = {
    "input_layernorm": "layer_norm1",
    "self_attention.linear_qkv": "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
    "self_attention.linear_proj": "self_attn.out_proj",
    "pre_mlp_layernorm": "layer_norm2",
    "mlp.linear_fc1": "mlp.fc1",
    "mlp.linear_fc2": "mlp.fc2",
}
_CLIP_OUTSIDE = {
    "conv1": "embeddings.patch_embedding",
    "position_embeddings": "embeddings.position_embedding",
    "ln_pre": "pre_layrnorm",
    "ln_post": "post_layernorm",
}
_VIT_OUTSIDE = {"conv1": "embeddings.patch_embeddings.projection", "ln_post": "layernorm"}
_VIT_VALUES = {
    "class_token": "embeddings.cls_token",
    "position_embeddings.weight": "embeddings.position_embeddings",
}
_VIT_LAYER = {
    "input_layernorm": "layernorm_before",
    "self_attention.linear_qkv": "attention.q_proj attention.k_proj attention.v_proj",
    "self_attention.linear_proj": "attention.o_proj",
    "pre_mlp_layernorm": "layernorm_after",
    "mlp.linear_fc1": "mlp.fc1",
    "mlp.linear_fc2": "mlp.fc2",
}
FAMILIES = {
    "clip_vision_model": EncoderFamily(
        subtype="clip",
        outside=_CLIP_OUTSIDE,
        layer=_CLIP_LAYER,
        layer_prefix="encoder.layers.{}.",
        values={"class_token": "embeddings.class_embedding"},
        ignored=("post_layernorm.", "embeddings.position_ids"),  # of the pooled output
    ),
    "siglip_vision_model": EncoderFamily(
        subtype="siglip",
        outside=_CLIP_OUTSIDE,
        layer=_CLIP_LAYER,
        layer_prefix="encoder.layers.{}.",
        ignored=("head.", "embeddings.position_ids"),
        eps=1e-6,
    ),
    "vit": EncoderFamily(
        subtype="vit",
        outside=_VIT_OUTSIDE,
        layer=_VIT_LAYER,
        layer_prefix="layers.{}.",
        values=_VIT_VALUES,
        ignored=("pooler.", "classifier."),
        eps=1e-12,
    ),
    "internvl_vision": EncoderFamily(
        subtype="internvit",
        outside=_VIT_OUTSIDE,
        layer=_VIT_LAYER
        | {
            "self_attention.linear_proj": "attention.projection_layer",
            "self_attention.q_layernorm": "attention.q_norm",
            "self_attention.k_layernorm": "attention.k_norm",
        },
        layer_prefix="encoder.layer.{}.",
        values=_VIT_VALUES
        | {
            "post_self_attn_layernorm.weight": "lambda_1",
            "post_mlp_layernorm.weight": "lambda_2",
        },
        has_layer_scale=True,
        eps=1e-6,
    ),
    "radio": EncoderFamily(
        subtype="radio",
        outside={"embedder": "embeddings.patch_projection"},
        layer=_VIT_LAYER | {"input_layernorm": "norm1", "pre_mlp_layernorm": "norm2"},
        layer_prefix="encoder.layer.{}.",
        values={
            "class_token": "embeddings.cls_register_token",
            "position_embeddings.weight": "embeddings.position_embedding",
            "post_self_attn_layernorm.weight": "layer_scale1.lambda1",
            "post_mlp_layernorm.weight": "layer_scale2.lambda1",
        },
        ignored=("input_conditioner.", "summary_idxs"),  # images are normalised before
        has_layer_scale=True,
        eps=1e-6,
    ),
    "whisper": EncoderFamily(
        subtype="whisper",
        outside={"conv1": "conv1", "conv2": "conv2", "ln_post": "layer_norm"},
        layer={
            "input_layernorm": "self_attn_layer_norm",
            "self_attention.linear_qkv": "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
            "self_attention.linear_proj": "self_attn.out_proj",
            "pre_mlp_layernorm": "final_layer_norm",
            "mlp.linear_fc1": "fc1",
            "mlp.linear_fc2": "fc2",
        },
        layer_prefix="layers.{}.",
        ignored=("embed_positions.",),  # fixed waves
        has_key_bias=False,
    ),
}
_OF_WHISPER = {
    "num_hidden_layers": "encoder_layers",
    "hidden_size": "d_model",
    "num_attention_heads": "encoder_attention_heads",
    "intermediate_size": "encoder_ffn_dim",
    "hidden_act": "activation_function",
}


def build_encoder(
    config: Config, pg_collection: ProcessGroupCollection | None = None, **changes: Any
) -> Encoder:
    """Build the encoder that ``config`` (config.json of an encoder) describes, without weights.

    ``changes``: fields of the `TransformerConfig`.  Raises CheckpointError if it is not supported.
    """
    family = _family_of(config)
    try:
        if family.subtype == "whisper":
            return _whisper(config, pg_collection, changes)
        of_layers = _layers_of(config, family, changes)
        height, width = _pair(config["max_img_size" if family.subtype == "radio" else "image_size"])
        side, other = _pair(config["patch_size"])
    except KeyError as error:
        raise CheckpointError(f"config.json has no {error.args[0]}") from None
    if side != other:
        raise CheckpointError(f"config.json has patch_size {[side, other]}: give squares")
    if config.get("use_swiglu_ffn") or config.get("video_temporal_patch_size"):
        raise CheckpointError(
            "config.json describes gated layers or video, which are not supported"
        )
    spec = get_vit_layer_with_local_spec(of_layers, has_layer_scale=family.has_layer_scale)
    if family.subtype == "radio":
        return RADIOViTModel(
            of_layers,
            spec,
            class_token_len=config["num_cls_tokens"] + config["num_registers"],
            patch_dim=side,
            max_img_h=height,
            max_img_w=width,
            pg_collection=pg_collection,
        )
    return CLIPViTModel(
        of_layers,
        spec,
        patch_dim=side,
        img_h=height,
        img_w=width,
        model_subtype=family.subtype,
        pg_collection=pg_collection,
    )


def _whisper(
    config: Config, pg_collection: ProcessGroupCollection | None, changes: Mapping[str, Any]
) -> WhisperEncoderModel:
    if config.get("scale_embedding"):
        raise CheckpointError("config.json has scale_embedding true, which cannot be converted")
    usual = {name: config[theirs] for name, theirs in _OF_WHISPER.items()}
    of_layers = _layers_of(usual, FAMILIES["whisper"], changes)
    return WhisperEncoderModel(
        of_layers,
        get_vit_layer_with_local_spec(of_layers),
        num_mel_bins=config["num_mel_bins"],
        max_source_positions=config["max_source_positions"],
        pg_collection=pg_collection,
    )


def _layers_of(
    config: Config, family: EncoderFamily, changes: Mapping[str, Any]
) -> TransformerConfig:
    width = config.get("intermediate_size")
    return TransformerConfig(
        **{
            "num_layers": config["num_hidden_layers"],
            "hidden_size": config["hidden_size"],
            "num_attention_heads": config["num_attention_heads"],
            "ffn_hidden_size": width or int(config["hidden_size"] * config["mlp_ratio"]),
            "activation_func": _activation(config["hidden_act"]),
            "bias_activation_fusion": False,  # it would replace GELU by its approximation
            "layernorm_epsilon": config.get("layer_norm_eps", family.eps),
            "normalization": _norm_of(config),
            "attention_dropout": 0.0,
            "hidden_dropout": 0.0,
            "qk_layernorm_full_width": bool(config.get("use_qk_norm")),
            **changes,
        }
    )


def encoder_from_hf(
    model: Encoder, config: Config, tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the complete tensors of ``model``, a model on one process, from ``tensors``.

    A bias that theirs lack is zero.  Raises CheckpointError for a tensor that is missing, has
    another shape, or has no counterpart.
    """
    family = _family_of(config)
    found: dict[str, Tensor] = {}
    used: set[str] = set()
    for name, param in model.named_parameters():
        names = family.theirs(name)
        used.update(names)
        absent = family.absent(names, config)
        missing = [each for each in names if each not in tensors and each not in absent]
        if missing:
            raise CheckpointError(f"the encoder has no tensor {missing[0]}")
        nothing = param.new_zeros(model.config.hidden_size)  # of a bias
        parts = [tensors.get(each, nothing) for each in names]
        made = _rule(names).to_ours(parts, model.config)  # type: ignore[arg-type]
        if made.numel() != param.numel():
            raise CheckpointError(
                f"{names[0]} has shape {tuple(parts[0].shape)}, which does not fit {name} of shape "
                f"{tuple(param.shape)}"
            )
        found[name] = made.reshape(param.shape)
    left = [n for n in tensors if n not in used and not n.startswith(family.ignored)]
    if left:
        raise CheckpointError(f"{left[0]} has no counterpart in a {family.subtype} encoder")
    return found


def encoder_to_hf(
    model: Encoder, config: Config, tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return ``tensors``, complete ones under our names, under theirs; the reverse of the above.

    Raises CheckpointError if theirs have no bias where ours is not zero.
    """
    family = _family_of(config)
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        names = family.theirs(name)
        absent = family.absent(names, config)
        parts = _rule(names).to_theirs(tensor, model.config)  # type: ignore[arg-type]
        for each, part in zip(names, parts, strict=True):
            if each not in absent:
                out[each] = part.reshape(_their_shape(each, part)).contiguous()
            elif part.any():
                raise CheckpointError(f"{name} is not zero, and their model has no {each}")
    return out


def _their_shape(name: str, tensor: Tensor) -> tuple[int, ...]:
    """Return the shape in theirs: some of our embeddings have a dimension of 1 more or less."""
    if name == "embeddings.class_embedding":
        return (tensor.numel(),)
    if name == "embeddings.cls_register_token":
        return tuple(tensor.shape[1:])
    if name == "embeddings.patch_projection.weight":
        return (len(tensor), tensor[0].numel())
    if name in ("embeddings.position_embeddings", "embeddings.position_embedding"):
        return (1, *tensor.shape)
    return tuple(tensor.shape)


def _rule(names: tuple[str, ...]) -> Rule:
    return Rule(names, is_qkv=len(names) > 1)


def _family_of(config: Config) -> EncoderFamily:
    kind = config.get("model_type")
    if kind not in FAMILIES:
        raise CheckpointError(
            f"config.json has model_type {kind}: only {', '.join(FAMILIES)} can be converted"
        )
    return FAMILIES[str(kind)]


def _activation(name: str) -> Any:
    if name not in _ACTIVATIONS:
        raise CheckpointError(
            f"config.json has hidden_act {name}: only {', '.join(_ACTIVATIONS)} can be converted"
        )
    return _ACTIVATIONS[name]


def _norm_of(config: Config) -> str:
    names = {"layer_norm": "LayerNorm", "rms_norm": "RMSNorm"}
    return names[config.get("norm_type", "layer_norm")]


def _pair(value: int | list[int]) -> tuple[int, int]:
    """Return height and width."""
    return (value, value) if isinstance(value, int) else (value[0], value[1])

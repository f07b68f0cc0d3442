"""Encoders of images and sound from Hugging Face and back: config.json, tensors bit by bit.

Only the encoder itself is converted: a pooling head or a projection beside it is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.activations import openai_gelu, quick_gelu
from megatron.core.config.errors import CheckpointError
from megatron.core.dist_checkpointing.safetensors_file import LazyTensor
from megatron.core.models.mimo.submodules.audio import WhisperEncoderModel
from megatron.core.models.multimodal.qwen2_vl_model import Qwen2VLVisionModel
from megatron.core.models.vision.clip_vit_model import CLIPViTModel
from megatron.core.models.vision.radio import RADIOViTModel
from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_local_spec
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.conversion.family import Config
from megatron.training.conversion.lazy import shared_parts
from megatron.training.conversion.tensors import Rule

Encoder: TypeAlias = CLIPViTModel | RADIOViTModel | WhisperEncoderModel | Qwen2VLVisionModel

ACTIVATIONS = {
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
    does not belong to the encoder.  ``unread``: such tensors that a model of `transformers` has in
    any case -> a tensor of the same shape.
    """

    subtype: str  # a key of `clip_vit_model.KINDS`, or radio, or whisper
    outside: Mapping[str, str]
    layer: Mapping[str, str]
    layer_prefix: str
    values: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    unread: Mapping[str, str] = field(default_factory=dict)
    has_layer_scale: bool = False
    has_key_bias: bool = True
    eps: float = 1e-5  # if config.json has none
    entries: Mapping[str, str] = field(default_factory=dict)  # usual name in config.json -> theirs

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
        unread={f"post_layernorm.{kind}": f"pre_layrnorm.{kind}" for kind in ("weight", "bias")},
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
        ignored=("input_conditioner.", "summary_idxs"),  # images are normalized before
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
        entries={
            "num_hidden_layers": "encoder_layers",
            "hidden_size": "d_model",
            "num_attention_heads": "encoder_attention_heads",
            "intermediate_size": "encoder_ffn_dim",
            "hidden_act": "activation_function",
        },
    ),
}
_SIGLIP = FAMILIES["siglip_vision_model"]
# Encoders that exist only within a larger model; that of LLaVA reads features before the last norm.
PARTS = {
    "siglip_without_norm": replace(
        _SIGLIP, subtype="siglip_without_norm", ignored=(*_SIGLIP.ignored, "post_layernorm.")
    ),
    "qwen2_vl_vision": EncoderFamily(
        subtype="qwen2_vl",
        outside={"conv1": "patch_embed.proj", "ln_post": "merger.ln_q"},
        layer={
            "input_layernorm": "norm1",
            "self_attention.linear_qkv": "attn.qkv",
            "self_attention.linear_proj": "attn.proj",
            "pre_mlp_layernorm": "norm2",
            "mlp.linear_fc1": "mlp.fc1",
            "mlp.linear_fc2": "mlp.fc2",
        },
        layer_prefix="blocks.{}.",
        eps=1e-6,
        entries={
            "num_hidden_layers": "depth",
            "hidden_size": "embed_dim",
            "num_attention_heads": "num_heads",
        },
    ),
}
# Their name -> their shape, from ours: some have dimensions that ours lack, or lack some of ours.
_SHAPES: dict[str, Callable[[Sequence[int]], tuple[int, ...]]] = {
    "embeddings.class_embedding": lambda ours: (math.prod(ours),),
    "embeddings.cls_register_token": lambda ours: tuple(ours[1:]),
    "embeddings.patch_projection.weight": lambda ours: (ours[0], math.prod(ours[1:])),
    "embeddings.position_embeddings": lambda ours: (1, *ours),
    "embeddings.position_embedding": lambda ours: (1, *ours),
    # 3 colors and 2 frames of a square
    "patch_embed.proj.weight": lambda ours: (ours[0], 3, 2, *[math.isqrt(ours[1] // 6)] * 2),
}


def build_encoder(
    config: Config, pg_collection: ProcessGroupCollection | None = None, **changes: Any
) -> Encoder:
    """Build the encoder that ``config`` (config.json of an encoder) describes, without weights.

    ``changes``: fields of the `TransformerConfig`.  Raises CheckpointError if it is not supported.
    """
    family = family_of(config)
    of_layers = layers_of(config, **changes)
    spec = get_vit_layer_with_local_spec(of_layers, has_layer_scale=family.has_layer_scale)
    if family.subtype == "whisper":
        if config.get("scale_embedding"):
            raise CheckpointError("config.json has scale_embedding true, which cannot be converted")
        return WhisperEncoderModel(
            of_layers,
            spec,
            num_mel_bins=_entry(config, "num_mel_bins"),
            max_source_positions=_entry(config, "max_source_positions"),
            pg_collection=pg_collection,
        )
    if family.subtype == "qwen2_vl":
        assert pg_collection is not None, "a part of a larger model needs pg_collection"
        side = _entry(config, "patch_size")
        return Qwen2VLVisionModel(of_layers, spec, side, pg_collection=pg_collection)
    height, width, side = sizes_of(config)
    if config.get("use_swiglu_ffn") or config.get("video_temporal_patch_size"):
        raise CheckpointError(
            "config.json describes gated layers or video, which are not supported"
        )
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
        model_subtype=subtype_of(config),
        pg_collection=pg_collection,
    )


def layers_of(config: Config, **changes: Any) -> TransformerConfig:
    """Return the config of the encoder's layers, with ``changes``.  Raises CheckpointError."""
    family = family_of(config)
    config = {**config, **{n: _entry(config, theirs) for n, theirs in family.entries.items()}}
    act = _entry(config, "hidden_act")
    if act not in ACTIVATIONS:
        raise CheckpointError(
            f"config.json has hidden_act {act}: only {', '.join(ACTIVATIONS)} can be converted"
        )
    h = _entry(config, "hidden_size")
    width = config.get("intermediate_size")
    return TransformerConfig(
        **{
            "num_layers": _entry(config, "num_hidden_layers"),
            "hidden_size": h,
            "num_attention_heads": _entry(config, "num_attention_heads"),
            "ffn_hidden_size": width or int(h * _entry(config, "mlp_ratio")),
            "activation_func": ACTIVATIONS[act],
            "bias_activation_fusion": False,  # it would replace GELU by its approximation
            "layernorm_epsilon": config.get("layer_norm_eps", family.eps),
            "normalization": _norm_of(config),
            "attention_dropout": 0.0,
            "hidden_dropout": 0.0,
            "qk_layernorm_full_width": bool(config.get("use_qk_norm")),
            **changes,
        }
    )


def subtype_of(config: Config) -> str:
    """Return the encoder's --vision-model-type."""
    subtype = family_of(config).subtype
    is_small = subtype == "internvit" and _norm_of(config) == "LayerNorm"
    return "internvit300M" if is_small else subtype


def sizes_of(config: Config) -> tuple[int, int, int]:
    """Return height and width of an image, the largest one of RADIO, and the side of a patch."""
    is_radio = family_of(config).subtype == "radio"
    height, width = _pair(_entry(config, "max_img_size" if is_radio else "image_size"))
    side, other = _pair(_entry(config, "patch_size"))
    if side != other:
        raise CheckpointError(f"config.json has patch_size {[side, other]}: give squares")
    return height, width, side


def _entry(config: Config, name: str) -> Any:
    if name not in config:
        raise CheckpointError(f"config.json has no {name}")
    return config[name]


def import_encoder(
    model: Encoder, config: Config, weights: Mapping[str, LazyTensor]
) -> dict[str, LazyTensor]:
    """Return the complete tensors of ``model``, a model on one process, which may be on "meta".

    A bias that theirs lack is zero.  Raises CheckpointError for a tensor that is missing, has
    another shape, or has no counterpart.
    """
    family = family_of(config)
    found: dict[str, LazyTensor] = {}
    used: set[str] = set()
    for name, param in model.named_parameters():
        names = family.theirs(name)
        used.update(names)
        absent = family.absent(names, config)
        missing = [each for each in names if each not in weights and each not in absent]
        if missing:
            raise CheckpointError(f"the encoder has no tensor {missing[0]}")
        parts = [weights.get(each) for each in names]
        rule = Rule(names, is_qkv=".linear_qkv." in name)
        shapes = [tuple(t.shape) for t in rule.to_theirs(_meta(param), model.config)]
        dtype = next((part.dtype for part in parts if part is not None), param.dtype)
        for part, shape in zip(parts, shapes, strict=True):
            if part is not None and math.prod(part.shape) != math.prod(shape):
                raise CheckpointError(
                    f"{part.name} has shape {part.shape}, which does not fit {name} of shape "
                    f"{tuple(param.shape)}"
                )
        blank = partial(torch.zeros, model.config.hidden_size, dtype=dtype)  # of a bias
        makes = [blank if part is None else part.make for part in parts]
        make = partial(_joined, makes, rule, model.config, tuple(param.shape))
        found[name] = LazyTensor(name, dtype, tuple(param.shape), make)
    left = [n for n in weights if n not in used and not n.startswith(family.ignored)]
    if left:
        raise CheckpointError(f"{left[0]} has no counterpart in a {family.subtype} encoder")
    return found


def _joined(
    makes: Sequence[Callable[[], Tensor]],
    rule: Rule,
    config: TransformerConfig,
    shape: tuple[int, ...],
) -> Tensor:
    return rule.to_ours([make() for make in makes], config).reshape(shape)


def export_encoder(
    model: Encoder, config: Config, tensors: Mapping[str, LazyTensor]
) -> list[LazyTensor]:
    """Return ``tensors``, complete ones under our names, under theirs.

    Raises CheckpointError if theirs have no bias where ours is not zero.
    """
    family = family_of(config)
    out: list[LazyTensor] = []
    for name, tensor in tensors.items():
        names = family.theirs(name)
        absent = family.absent(names, config)
        rule = Rule(names, is_qkv=".linear_qkv." in name)
        shapes = [t.shape for t in rule.to_theirs(_meta(tensor), model.config)]
        makes = shared_parts(partial(_parts, tensor, rule, model.config), len(names))
        for each, shape, make in zip(names, shapes, makes, strict=True):
            if each not in absent:
                out.append(LazyTensor(each, tensor.dtype, _SHAPES.get(each, tuple)(shape), make))
            elif make().any():
                raise CheckpointError(f"{name} is not zero, and their model has no {each}")
    return out


def _parts(tensor: LazyTensor, rule: Rule, config: TransformerConfig) -> list[Tensor]:
    parts = rule.to_theirs(tensor.make(), config)
    return [
        part.reshape(_SHAPES.get(name, tuple)(part.shape)).contiguous()
        for name, part in zip(rule.theirs, parts, strict=True)
    ]


def _meta(tensor: Tensor | LazyTensor) -> Tensor:
    return torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device=torch.device("meta"))


def family_of(config: Config) -> EncoderFamily:
    """Return the family of an encoder.  Raises CheckpointError."""
    kind = config.get("model_type")
    family = (FAMILIES | PARTS).get(str(kind))
    if family is None:
        raise CheckpointError(
            f"config.json has model_type {kind}: only {', '.join(FAMILIES)} can be converted"
        )
    return family


def _norm_of(config: Config) -> str:
    names = {"layer_norm": "LayerNorm", "rms_norm": "RMSNorm"}
    return names[config.get("norm_type", "layer_norm")]


def _pair(value: int | list[int]) -> tuple[int, int]:
    """Return height and width."""
    return (value, value) if isinstance(value, int) else (value[0], value[1])

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
from megatron.core.models.vision.clip_vit_model import CLIPViTModel
from megatron.core.models.vision.radio import RADIOViTModel
from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_local_spec
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.conversion.family import Config
from megatron.training.conversion.lazy import shared_parts
from megatron.training.conversion.tensors import Rule

Encoder: TypeAlias = CLIPViTModel | RADIOViTModel | WhisperEncoderModel

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
# Encoders within a larger model that reads their features before the last norm.
_SIGLIP = FAMILIES["siglip_vision_model"]
_IGNORED = (*_SIGLIP.ignored, "post_layernorm.")
_SIGLIP = replace(_SIGLIP, subtype="siglip_without_norm", ignored=_IGNORED)
WITHOUT_NORM = {_SIGLIP.subtype: _SIGLIP}
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
    if family.subtype == "whisper":
        return _whisper(config, pg_collection, changes)
    of_layers = layers_of(config, **changes)
    height, width, side = sizes_of(config)
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
        model_subtype=subtype_of(config),
        pg_collection=pg_collection,
    )


def _whisper(
    config: Config, pg_collection: ProcessGroupCollection | None, changes: Mapping[str, Any]
) -> WhisperEncoderModel:
    if config.get("scale_embedding"):
        raise CheckpointError("config.json has scale_embedding true, which cannot be converted")
    usual = {name: _entry(config, theirs) for name, theirs in _OF_WHISPER.items()}
    of_layers = layers_of({**usual, "model_type": "whisper"}, **changes)
    return WhisperEncoderModel(
        of_layers,
        get_vit_layer_with_local_spec(of_layers),
        num_mel_bins=_entry(config, "num_mel_bins"),
        max_source_positions=_entry(config, "max_source_positions"),
        pg_collection=pg_collection,
    )


def layers_of(config: Config, **changes: Any) -> TransformerConfig:
    """Return the config of the encoder's layers, with ``changes``.  Raises CheckpointError."""
    family = _family_of(config)
    h = _entry(config, "hidden_size")
    width = config.get("intermediate_size")
    return TransformerConfig(
        **{
            "num_layers": _entry(config, "num_hidden_layers"),
            "hidden_size": h,
            "num_attention_heads": _entry(config, "num_attention_heads"),
            "ffn_hidden_size": width or int(h * _entry(config, "mlp_ratio")),
            "activation_func": _activation(_entry(config, "hidden_act")),
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
    subtype = _family_of(config).subtype
    is_small = subtype == "internvit" and _norm_of(config) == "LayerNorm"
    return "internvit300M" if is_small else subtype


def sizes_of(config: Config) -> tuple[int, int, int]:
    """Return height and width of an image, the largest one of RADIO, and the side of a patch."""
    is_radio = _family_of(config).subtype == "radio"
    height, width = _pair(_entry(config, "max_img_size" if is_radio else "image_size"))
    side, other = _pair(_entry(config, "patch_size"))
    if side != other:
        raise CheckpointError(f"config.json has patch_size {[side, other]}: give squares")
    return height, width, side


def _entry(config: Config, name: str) -> Any:
    if name not in config:
        raise CheckpointError(f"config.json has no {name}")
    return config[name]


def encoder_from_hf(
    model: Encoder, config: Config, tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the complete tensors of ``model``, a model on one process, from ``tensors``.

    A bias that theirs lack is zero.  Raises CheckpointError for a tensor that is missing, has
    another shape, or has no counterpart.
    """
    return {n: t.make() for n, t in import_encoder(model, config, as_lazy(tensors)).items()}


def encoder_to_hf(
    model: Encoder, config: Config, tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return ``tensors``, complete ones under our names, under theirs; the reverse of the above.

    Raises CheckpointError if theirs have no bias where ours is not zero.
    """
    return {t.name: t.make() for t in export_encoder(model, config, as_lazy(tensors))}


def as_lazy(tensors: Mapping[str, Tensor]) -> dict[str, LazyTensor]:
    """Return tensors in memory as lazy ones."""
    return {n: LazyTensor(n, t.dtype, tuple(t.shape), t.detach) for n, t in tensors.items()}


def import_encoder(
    model: Encoder, config: Config, weights: Mapping[str, LazyTensor]
) -> dict[str, LazyTensor]:
    """Return the weights of ``model``, lazily, from Hugging Face's; ``model`` may be on "meta"."""
    family = _family_of(config)
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
        shapes = [tuple(t.shape) for t in _rule(names).to_theirs(_meta(param), model.config)]  # type: ignore[arg-type]
        dtype = next((part.dtype for part in parts if part is not None), param.dtype)
        for part, shape in zip(parts, shapes, strict=True):
            if part is not None and math.prod(part.shape) != math.prod(shape):
                raise CheckpointError(
                    f"{part.name} has shape {part.shape}, which does not fit {name} of shape "
                    f"{tuple(param.shape)}"
                )
        blank = partial(torch.zeros, model.config.hidden_size, dtype=dtype)  # of a bias
        makes = [blank if part is None else part.make for part in parts]
        make = partial(_joined, makes, names, model.config, tuple(param.shape))
        found[name] = LazyTensor(name, dtype, tuple(param.shape), make)
    left = [n for n in weights if n not in used and not n.startswith(family.ignored)]
    if left:
        raise CheckpointError(f"{left[0]} has no counterpart in a {family.subtype} encoder")
    return found


def _joined(
    makes: Sequence[Callable[[], Tensor]],
    names: tuple[str, ...],
    config: TransformerConfig,
    shape: tuple[int, ...],
) -> Tensor:
    parts = [make() for make in makes]
    return _rule(names).to_ours(parts, config).reshape(shape)  # type: ignore[arg-type]


def export_encoder(
    model: Encoder, config: Config, tensors: Mapping[str, LazyTensor]
) -> list[LazyTensor]:
    """Return Hugging Face's tensors, lazily, from ours; ``model`` may be on "meta"."""
    family = _family_of(config)
    out: list[LazyTensor] = []
    for name, tensor in tensors.items():
        names = family.theirs(name)
        absent = family.absent(names, config)
        shapes = [t.shape for t in _rule(names).to_theirs(_meta(tensor), model.config)]  # type: ignore[arg-type]
        makes = shared_parts(partial(_parts, tensor, names, model.config), len(names))
        for each, shape, make in zip(names, shapes, makes, strict=True):
            if each not in absent:
                out.append(LazyTensor(each, tensor.dtype, _their_shape(each, shape), make))
            elif make().any():
                raise CheckpointError(f"{name} is not zero, and their model has no {each}")
    return out


def _parts(tensor: LazyTensor, names: tuple[str, ...], config: TransformerConfig) -> list[Tensor]:
    parts = _rule(names).to_theirs(tensor.make(), config)  # type: ignore[arg-type]
    return [
        part.reshape(_their_shape(name, part.shape)).contiguous()
        for name, part in zip(names, parts, strict=True)
    ]


def _meta(tensor: Tensor | LazyTensor) -> Tensor:
    return torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device=torch.device("meta"))


def _their_shape(name: str, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape in theirs: some of our embeddings have a dimension of 1 more or less."""
    if name == "embeddings.class_embedding":
        return (math.prod(shape),)
    if name == "embeddings.cls_register_token":
        return tuple(shape[1:])
    if name == "embeddings.patch_projection.weight":
        return (shape[0], math.prod(shape[1:]))
    if name in ("embeddings.position_embeddings", "embeddings.position_embedding"):
        return (1, *shape)
    return tuple(shape)


def _rule(names: tuple[str, ...]) -> Rule:
    return Rule(names, is_qkv=len(names) > 1)


def _family_of(config: Config) -> EncoderFamily:
    kind = config.get("model_type")
    if kind not in FAMILIES | WITHOUT_NORM:
        raise CheckpointError(
            f"config.json has model_type {kind}: only {', '.join(FAMILIES)} can be converted"
        )
    return (FAMILIES | WITHOUT_NORM)[str(kind)]


def _activation(name: str) -> Any:
    if name not in ACTIVATIONS:
        raise CheckpointError(
            f"config.json has hidden_act {name}: only {', '.join(ACTIVATIONS)} can be converted"
        )
    return ACTIVATIONS[name]


def _norm_of(config: Config) -> str:
    names = {"layer_norm": "LayerNorm", "rms_norm": "RMSNorm"}
    return names[config.get("norm_type", "layer_norm")]


def _pair(value: int | list[int]) -> tuple[int, int]:
    """Return height and width."""
    return (value, value) if isinstance(value, int) else (value[0], value[1])


_LAYER = {
    "input_layernorm": "norm1",
    "self_attention.linear_qkv": "attn.qkv",
    "self_attention.linear_proj": "attn.proj",
    "pre_mlp_layernorm": "norm2",
    "mlp.linear_fc1": "mlp.fc1",
    "mlp.linear_fc2": "mlp.fc2",
}
_PATCHES = "patch_embed.proj.weight"
_OUR_PATCHES = "vision_model.conv1.weight"
_OUTSIDE = {
    "vision_model.ln_post": "merger.ln_q",
    "vision_projection.encoder.linear_fc1": "merger.mlp.0",
    "vision_projection.encoder.linear_fc2": "merger.mlp.2",
}


def layers_of_qwen(config: Config, **changes: Any) -> TransformerConfig:
    """Return the config of the layers of Qwen2-VL's encoder.  Raises CheckpointError."""
    if config.get("hidden_act", "quick_gelu") != "quick_gelu":
        raise CheckpointError(
            f"vision_config has hidden_act {config['hidden_act']}: only quick_gelu can be converted"
        )
    width = config["embed_dim"]
    return _config(
        {
            "num_layers": config["depth"],
            "hidden_size": width,
            "num_attention_heads": config["num_heads"],
            "ffn_hidden_size": int(width * config["mlp_ratio"]),
            "activation_func": quick_gelu,
            **changes,
        }
    )


def projector_of_qwen(config: Config, **changes: Any) -> TransformerConfig:
    """Return the config of the projector: two layers, the first as wide as a block of patches."""
    width = config["embed_dim"] * config["spatial_merge_size"] ** 2
    return _config(
        {
            "num_layers": 1,
            "hidden_size": config["hidden_size"],
            "num_attention_heads": 1,
            "ffn_hidden_size": width,
            "activation_func": torch.nn.functional.gelu,
            **changes,
        }
    )


def _config(values: dict[str, Any]) -> TransformerConfig:
    always = {
        "layernorm_epsilon": 1e-6,
        "bias_activation_fusion": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }
    return TransformerConfig(**always | values)


def qwen_from_hf(layers: TransformerConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of the encoder and the projector by the names of `LLaVAModel`.

    ``tensors``: those of ``model.visual``.  Raises CheckpointError for one that is missing or left.
    """
    return {name: t.make() for name, t in import_qwen(layers, as_lazy(tensors)).items()}


def import_qwen(
    layers: TransformerConfig, weights: Mapping[str, LazyTensor]
) -> dict[str, LazyTensor]:
    """Do `qwen_from_hf` for tensors that are made later."""
    left = dict(weights)
    try:
        patches = left.pop(_PATCHES)
        shape = (patches.shape[0], math.prod(patches.shape[1:]))
        found = {_OUR_PATCHES: _reshaped(_OUR_PATCHES, patches, shape)}
        for ours, theirs in _names(layers).items():
            tensor = left.pop(theirs)
            make = tensor.make
            if ".linear_qkv." in ours:
                make = partial(_interleaved, tensor, layers)
            found[ours] = replace(tensor, name=ours, make=make)
    except KeyError as error:
        raise CheckpointError(f"the encoder has no tensor {error.args[0]}") from None
    if left:
        raise CheckpointError(f"{next(iter(left))} has no counterpart in Qwen2-VL's encoder")
    return found


def qwen_to_hf(
    layers: TransformerConfig, config: Config, tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the reverse of `qwen_from_hf`."""
    return {t.name: t.make() for t in export_qwen(layers, config, as_lazy(tensors))}


def export_qwen(
    layers: TransformerConfig, config: Config, tensors: Mapping[str, LazyTensor]
) -> list[LazyTensor]:
    """Do `qwen_to_hf` for tensors that are made later."""
    side = config["patch_size"]
    frames = config["temporal_patch_size"]
    patches = tensors[_OUR_PATCHES]
    out = [_reshaped(_PATCHES, patches, (patches.shape[0], 3, frames, side, side))]
    for ours, theirs in _names(layers).items():
        tensor = tensors[ours]
        make = tensor.make
        if ".linear_qkv." in ours:
            make = partial(_one_after_another, tensor, layers)
        out.append(replace(tensor, name=theirs, make=make))
    return out


def _reshaped(name: str, tensor: LazyTensor, shape: tuple[int, ...]) -> LazyTensor:
    return LazyTensor(name, tensor.dtype, shape, lambda: tensor.make().reshape(shape))


def _interleaved(tensor: LazyTensor, layers: TransformerConfig) -> Tensor:
    return _QKV.to_ours(list(tensor.make().chunk(3)), layers)  # type: ignore[arg-type]


def _one_after_another(tensor: LazyTensor, layers: TransformerConfig) -> Tensor:
    return torch.cat(_QKV.to_theirs(tensor.make(), layers))  # type: ignore[arg-type]


_QKV = Rule(("q", "k", "v"), is_qkv=True)


def _names(layers: TransformerConfig) -> dict[str, str]:
    """Return our name -> theirs of each tensor but that of the patches."""
    modules = dict(_OUTSIDE)
    for number in range(layers.num_layers):
        for ours, theirs in _LAYER.items():
            modules[f"vision_model.decoder.layers.{number}.{ours}"] = f"blocks.{number}.{theirs}"
    return {
        f"{ours}.{kind}": f"{theirs}.{kind}"
        for ours, theirs in modules.items()
        for kind in ("weight", "bias")
    }

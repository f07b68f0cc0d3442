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
from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_local_spec
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.conversion.family import Config, Names, named_rule
from megatron.training.conversion.lazy import reshaped
from megatron.training.conversion.tensors import Rule
from megatron.training.conversion.verify import groups_of_one_rank

Encoder: TypeAlias = CLIPViTModel | WhisperEncoderModel | Qwen2VLVisionModel

ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_pytorch_tanh": openai_gelu,
    "quick_gelu": quick_gelu,
    "relu": F.relu,
    "silu": F.silu,
}


@dataclass(frozen=True, kw_only=True)
class EncoderFamily:
    """How the tensors of one family are called; see `named_rule`.

    ``outside`` and ``layer``: our name -> theirs; ``layer_prefix``: theirs, {} is the number.
    ``ignored``: beginnings of names of what does not belong to the encoder.  ``unread``: such
    tensors that a model of `transformers` has in any case -> a tensor of the same shape.
    """

    subtype: str  # a key of `clip_vit_model.KINDS`, or whisper
    outside: Names
    layer: Names
    layer_prefix: str
    ignored: tuple[str, ...] = ()
    unread: Mapping[str, str] = field(default_factory=dict)
    has_layer_scale: bool = False
    has_key_bias: bool = True
    eps: float = 1e-5  # if config.json has none
    entries: Mapping[str, str] = field(default_factory=dict)  # usual name in config.json -> theirs

    def rule(self, ours: str) -> Rule:
        """Return the rule of our tensor.  Raises CheckpointError if there is none."""
        prefix = ""
        name = ours
        table = self.outside
        if ours.startswith("decoder.layers."):
            _, _, number, name = ours.split(".", 3)
            prefix, table = self.layer_prefix.format(number), self.layer
        rule = named_rule(table, name)
        if rule is None:
            raise CheckpointError(f"{ours} has no counterpart in a {self.subtype} encoder")
        return replace(rule, theirs=tuple(prefix + each for each in rule.theirs))

    def absent(self, theirs: tuple[str, ...], config: Config) -> tuple[str, ...]:
        """Return which of ``theirs`` are biases of queries, keys or values that they lack."""
        if len(theirs) == 1 or not theirs[0].endswith(".bias"):
            return ()
        if not config.get("attention_bias", config.get("qkv_bias", True)):
            return theirs
        return () if self.has_key_bias else (theirs[1],)


def _layer(norm: str, qkv: str, output: str, next_norm: str, mlp: str = "mlp.") -> Names:
    """Return the names of a layer; ``{}`` in ``qkv`` stands for q, k and v."""
    parts = tuple(dict.fromkeys(map(qkv.format, "qkv")))
    return {
        "input_layernorm": norm,
        "self_attention.linear_qkv": Rule(parts, is_qkv=True),
        "self_attention.linear_proj": output,
        "pre_mlp_layernorm": next_norm,
        "mlp.linear_fc1": f"{mlp}fc1",
        "mlp.linear_fc2": f"{mlp}fc2",
    }


_CLIP = EncoderFamily(
    subtype="clip",
    outside={
        "class_token": "embeddings.class_embedding",
        "conv1": "embeddings.patch_embedding",
        "position_embeddings": "embeddings.position_embedding",
        "ln_pre": "pre_layrnorm",
        "ln_post": "post_layernorm",
    },
    layer=_layer("layer_norm1", "self_attn.{}_proj", "self_attn.out_proj", "layer_norm2"),
    layer_prefix="encoder.layers.{}.",
    ignored=("post_layernorm.", "embeddings.position_ids"),  # of the pooled output
    unread={f"post_layernorm.{kind}": f"pre_layrnorm.{kind}" for kind in ("weight", "bias")},
)
_SIGLIP = replace(
    _CLIP, subtype="siglip", ignored=("head.", "embeddings.position_ids"), unread={}, eps=1e-6
)
_VIT = EncoderFamily(
    subtype="vit",
    outside={
        "class_token": "embeddings.cls_token",
        "conv1": "embeddings.patch_embeddings.projection",
        "position_embeddings.weight": "embeddings.position_embeddings",
        "ln_post": "layernorm",
    },
    layer=_layer("layernorm_before", "attention.{}_proj", "attention.o_proj", "layernorm_after"),
    layer_prefix="layers.{}.",
    ignored=("pooler.", "classifier."),
    eps=1e-12,
)
FAMILIES = {
    "clip_vision_model": _CLIP,
    "siglip_vision_model": _SIGLIP,
    "vit": _VIT,
    "internvl_vision": replace(
        _VIT,
        subtype="internvit",
        layer={
            **_VIT.layer,
            "self_attention.linear_proj": "attention.projection_layer",
            "self_attention.q_layernorm": "attention.q_norm",
            "self_attention.k_layernorm": "attention.k_norm",
            "post_self_attn_layernorm.weight": "lambda_1",
            "post_mlp_layernorm.weight": "lambda_2",
        },
        layer_prefix="encoder.layer.{}.",
        ignored=(),
        has_layer_scale=True,
        eps=1e-6,
    ),
    "whisper": EncoderFamily(
        subtype="whisper",
        outside={"conv1": "conv1", "conv2": "conv2", "ln_post": "layer_norm"},
        layer=_layer(
            *("self_attn_layer_norm", "self_attn.{}_proj", "self_attn.out_proj"),
            *("final_layer_norm", ""),
        ),
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
# Encoders that exist only within a larger model; that of LLaVA reads features before the last norm.
PARTS = {
    "siglip_without_norm": replace(
        _SIGLIP, subtype="siglip_without_norm", ignored=(*_SIGLIP.ignored, "post_layernorm.")
    ),
    "qwen2_vl_vision": EncoderFamily(
        subtype="qwen2_vl",
        outside={"conv1": "patch_embed.proj", "ln_post": "merger.ln_q"},
        layer=_layer("norm1", "attn.qkv", "attn.proj", "norm2"),
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
    "embeddings.position_embeddings": lambda ours: (1, *ours),
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
    return CLIPViTModel(
        of_layers,
        spec,
        patch_dim=side,
        img_h=height,
        img_w=width,
        model_subtype=subtype_of(config),
        pg_collection=pg_collection,
    )


def encoder_on_meta(config: Config) -> Encoder:
    """Build the encoder of ``config`` for one process, on the device "meta"."""
    with torch.device("meta"):
        return build_encoder(config, groups_of_one_rank())


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
    """Return height and width of an image, and the side of a patch."""
    (height, width), (side, other) = (
        value if isinstance(value, list | tuple) else (value, value)
        for value in (_entry(config, "image_size"), _entry(config, "patch_size"))
    )
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
        rule = family.rule(name)
        used.update(rule.theirs)
        absent = family.absent(rule.theirs, config)
        parts = [weights.get(each) for each in rule.theirs]
        size = tuple(param.shape)
        like = LazyTensor(name, param.dtype, size, param.detach)
        for part, wanted in zip(parts, rule.split(like, model.config), strict=True):
            if part is None and wanted.name not in absent:
                raise CheckpointError(f"the encoder has no tensor {wanted.name}")
            if part is not None and math.prod(part.shape) != math.prod(wanted.shape):
                raise CheckpointError(
                    f"{part.name} has shape {part.shape}, which does not fit {name} of shape {size}"
                )
        dtype = next((part.dtype for part in parts if part is not None), param.dtype)
        blank = partial(torch.zeros, model.config.hidden_size, dtype=dtype)  # of a bias
        makes = [blank if part is None else part.make for part in parts]
        found[name] = LazyTensor(
            name, dtype, size, partial(_joined, makes, rule, model.config, size)
        )
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
        rule = family.rule(name)
        absent = family.absent(rule.theirs, config)
        for part in rule.split(tensor, model.config):
            if part.name not in absent:
                out.append(reshaped(part, _SHAPES.get(part.name, tuple)(part.shape)))
            elif part.make().any():
                raise CheckpointError(f"{name} is not zero, and their model has no {part.name}")
    return out


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

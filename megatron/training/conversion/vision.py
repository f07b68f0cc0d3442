"""Encoders of images and sound, and image classifiers, from Hugging Face and back, bit by bit.

An encoder has the conventions of its architecture (`training.models.encoders`): config.json must
ask for them.  Only the encoder itself is converted: a pooling head beside it is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from megatron.core.config.errors import CheckpointError
from megatron.core.config.value_types import JsonObject
from megatron.core.dist_checkpointing.formats import open_reader
from megatron.core.dist_checkpointing.records import from_param
from megatron.core.dist_checkpointing.safetensors_file import LazyTensor
from megatron.core.models.mimo import MimoModel
from megatron.core.params.param_info import info_of
from megatron.training.checkpointing.checkpoint_args import compare_models
from megatron.training.checkpointing.paths import open_checkpoint
from megatron.training.config.run import RunConfig
from megatron.training.conversion.family import (
    Config,
    Field,
    Names,
    Values,
    demand,
    named_rule,
    read_whole,
    same,
)
from megatron.training.conversion.hf_folder import read_weights
from megatron.training.conversion.lazy import reshaped, zeros
from megatron.training.conversion.source import default_args, run_config
from megatron.training.conversion.tensors import Heads, Rule
from megatron.training.conversion.verify import model_on_meta
from megatron.training.models.encoders import whisper_config
from megatron.training.models.mimo import AUDIO_ENCODER


@dataclass(frozen=True, kw_only=True)
class EncoderFamily:
    """How config.json and the tensors of one family are converted; see `named_rule`.

    ``fields``: conversions of config.json to flags and back.
    ``outside`` and ``layer``: our name -> theirs; ``layer_prefix``: theirs, {} is the number.
    ``ignored``: beginnings of names of what does not belong to the encoder.  ``unread``: such
    tensors that a model of `transformers` has in any case -> a tensor of the same shape.
    """

    subtype: str
    fields: tuple[Field, ...]
    outside: Names
    layer: Names
    layer_prefix: str
    ignored: tuple[str, ...] = ()
    unread: Mapping[str, str] = field(default_factory=dict)
    has_bias: bool = True  # of queries, keys and values, if config.json does not say it
    has_key_bias: bool = True

    def flags(self, config: Config) -> Values:
        """Return the flags, dest -> value, of the encoder that config.json describes."""
        return read_whole(
            f"{self.subtype} encoder",
            lambda: {name: value for f in self.fields for name, value in f.read(config).items()},
        )

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
        if not config.get("attention_bias", config.get("qkv_bias", self.has_bias)):
            return theirs
        return () if self.has_key_bias else (theirs[1],)


def names_of_layer(norm: str, qkv: str, output: str, next_norm: str, fc1: str, fc2: str) -> Names:
    """Return the names of a layer; ``qkv`` has q, k and v apart by blanks, or one name."""
    return {
        "input_layernorm": norm,
        "self_attention.linear_qkv": Rule(tuple(qkv.split()), is_qkv=True),
        "self_attention.linear_proj": output,
        "pre_mlp_layernorm": next_norm,
        "mlp.linear_fc1": fc1,
        "mlp.linear_fc2": fc2,
    }


def sizes(layers: int, width: int, ffn: int, heads: int, *, flags: str = "") -> tuple[Field, ...]:
    """Convert sizes, with these defaults; ``flags``: how the names of the flags begin."""
    return (
        same("num_hidden_layers", f"{flags}num_layers", layers),
        same("hidden_size", f"{flags}hidden_size", width),
        same("intermediate_size", f"{flags}ffn_hidden_size", ffn),
        same("num_attention_heads", f"{flags}num_attention_heads", heads),
    )


def image_sizes(image: int, patch: int, write: Callable[..., Values]) -> Field:
    """Convert height and width of images and the side of patches, with these defaults."""

    def read(config: Config) -> Values:
        (height, width), (side, other) = (
            value if isinstance(value, list | tuple) else (value, value)
            for value in (config.get("image_size", image), config.get("patch_size", patch))
        )
        if side != other or not all(type(n) is int and n > 0 for n in (height, width, side)):
            raise CheckpointError(
                f"config.json has image_size {[height, width]} and patch_size {[side, other]}: "
                "integers above 0, and square patches, are needed"
            )
        return {"img_h": height, "img_w": width, "patch_dim": side}

    return Field(read, write)


def _type(name: str) -> Field:
    return Field(lambda config: {"vision_model_type": name})


def _read_norm(config: Config) -> Values:
    is_rms = config.get("norm_type", "layer_norm") == "rms_norm"
    if bool(config.get("use_qk_norm")) != is_rms:
        raise CheckpointError(
            f"config.json has norm_type {config.get('norm_type')} and use_qk_norm "
            f"{config.get('use_qk_norm')}: only rms_norm with it and layer_norm without it can be "
            "converted"
        )
    return {"vision_model_type": "internvit" if is_rms else "internvit300M"}


def _write_norm(flags: Any) -> Values:
    is_rms = flags.vision_model_type == "internvit"
    norm = "rms_norm" if is_rms else "layer_norm"
    return {"norm_type": norm, "use_qk_norm": is_rms, "attention_bias": True}


def _write_square(flags: Any) -> Values:
    return {"image_size": flags.img_h, "patch_size": flags.patch_dim}


CLIP = EncoderFamily(
    subtype="clip",
    fields=(
        _type("clip"),
        *sizes(12, 768, 3072, 12, flags="vision_"),
        image_sizes(224, 32, _write_square),
        demand(hidden_act="quick_gelu", layer_norm_eps=1e-5),
    ),
    outside={
        "class_token": "embeddings.class_embedding",
        "conv1": "embeddings.patch_embedding",
        "position_embeddings": "embeddings.position_embedding",
        "ln_pre": "pre_layrnorm",
        "ln_post": "post_layernorm",
    },
    layer=names_of_layer(
        "layer_norm1",
        "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
        *("self_attn.out_proj", "layer_norm2", "mlp.fc1", "mlp.fc2"),
    ),
    layer_prefix="encoder.layers.{}.",
    ignored=("post_layernorm.", "embeddings.position_ids"),  # of the pooled output
    unread={f"post_layernorm.{kind}": f"pre_layrnorm.{kind}" for kind in ("weight", "bias")},
)
# LLaVA reads its features before the last norm, which a pooling head follows.
SIGLIP = replace(
    CLIP,
    subtype="siglip_without_norm",
    fields=(
        _type("siglip_without_norm"),
        *sizes(12, 768, 3072, 12, flags="vision_"),
        image_sizes(224, 16, _write_square),
        demand(hidden_act="gelu_pytorch_tanh", layer_norm_eps=1e-6),
        Field(write=lambda flags: {"vision_use_head": False}),
    ),
    ignored=("head.", *CLIP.ignored),
    unread={},
)
# Gemma-3 reads its features behind the last norm.
GEMMA3_TOWER = replace(
    SIGLIP,
    subtype="gemma3",
    fields=(
        _type("gemma3"),
        *SIGLIP.fields[1:-1],
        demand(is_required=True, vision_use_head=False),
    ),
    ignored=("embeddings.position_ids",),
)
INTERNVIT = EncoderFamily(
    subtype="internvit",
    fields=(
        Field(_read_norm, _write_norm),
        *sizes(24, 1024, 4096, 16, flags="vision_"),
        image_sizes(
            448,
            14,
            lambda flags: {
                "image_size": [flags.img_h, flags.img_w],
                "patch_size": [flags.patch_dim] * 2,
            },
        ),
        demand(hidden_act="gelu", layer_norm_eps=1e-6),
    ),
    outside={
        "class_token": "embeddings.cls_token",
        "conv1": "embeddings.patch_embeddings.projection",
        "position_embeddings.weight": "embeddings.position_embeddings",
    },
    layer={
        **names_of_layer(
            "layernorm_before",
            "attention.q_proj attention.k_proj attention.v_proj",
            *("attention.projection_layer", "layernorm_after", "mlp.fc1", "mlp.fc2"),
        ),
        "self_attention.q_layernorm": "attention.q_norm",
        "self_attention.k_layernorm": "attention.k_norm",
        "post_self_attn_layernorm.weight": "lambda_1",
        "post_mlp_layernorm.weight": "lambda_2",
    },
    layer_prefix="encoder.layer.{}.",
    has_bias=False,
)
QWEN2_VL = EncoderFamily(
    subtype="qwen2_vl",
    fields=(
        _type("qwen2_vl"),
        same("depth", "vision_num_layers", 32),
        same("embed_dim", "vision_hidden_size", 1280),
        same("num_heads", "vision_num_attention_heads", 16),
        Field(
            lambda config: {
                "vision_ffn_hidden_size": int(
                    config.get("embed_dim", 1280) * config.get("mlp_ratio", 4)
                )
            },
            lambda flags: {"mlp_ratio": flags.vision_ffn_hidden_size // flags.vision_hidden_size},
        ),
        same("patch_size", "patch_dim", 14),
        demand(hidden_act="quick_gelu", spatial_merge_size=2, temporal_patch_size=2, in_channels=3),
    ),
    outside={"conv1": "patch_embed.proj", "ln_post": "merger.ln_q"},
    layer=names_of_layer("norm1", "attn.qkv", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2"),
    layer_prefix="blocks.{}.",
)


def _check_axial_rope(config: Config) -> Values:
    rope = config.get("rope_parameters") or {}
    base = rope.get("rope_theta", config.get("rope_theta", 1e4))
    if base != 1e4:
        raise CheckpointError(
            f"vision_config has rope_theta {base}: only 10000 can be converted, which is that of "
            "the encoder here"
        )
    return {}


_QWEN3_SIZES = (
    _type("qwen3_vl"),
    Field(_check_axial_rope),
    same("depth", "vision_num_layers", 27),
    same("hidden_size", "vision_hidden_size", 1152),
    same("intermediate_size", "vision_ffn_hidden_size", 4304),
    same("num_heads", "vision_num_attention_heads", 16),
    same("patch_size", "patch_dim", 16),
    same("num_position_embeddings", "vision_num_position_embeddings", 2304),
    demand(hidden_act="gelu_pytorch_tanh", spatial_merge_size=2),
    demand(temporal_patch_size=2, in_channels=3),
)
QWEN3_VL = EncoderFamily(
    subtype="qwen3_vl",
    fields=(
        *_QWEN3_SIZES,
        same("deepstack_visual_indexes", "deepstack_visual_indexes", (8, 16, 24), tuple, list),
    ),
    outside={
        "conv1": "patch_embed.proj",
        "position_embeddings": "pos_embed",
        "ln_post": "merger.norm",
    },
    layer=names_of_layer(
        *("norm1", "attn.qkv", "attn.proj", "norm2", "mlp.linear_fc1", "mlp.linear_fc2")
    ),
    layer_prefix="blocks.{}.",
)
QWEN3_5 = replace(
    QWEN3_VL,
    fields=(*_QWEN3_SIZES, Field(lambda config: {"deepstack_visual_indexes": ()})),
)
PIXTRAL = EncoderFamily(
    subtype="pixtral",
    fields=(
        _type("pixtral"),
        Field(_check_axial_rope),
        *sizes(24, 1024, 4096, 16, flags="vision_"),
        image_sizes(1024, 16, _write_square),
        demand(is_required=True, hidden_act="silu"),
        demand(num_channels=3),
    ),
    outside={"conv1": "patch_conv", "ln_pre": "ln_pre"},
    layer={
        **names_of_layer(
            "attention_norm",
            "attention.q_proj attention.k_proj attention.v_proj",
            *("attention.o_proj", "ffn_norm", "", "feed_forward.down_proj"),
        ),
        "mlp.linear_fc1": Rule(("feed_forward.gate_proj", "feed_forward.up_proj")),
    },
    layer_prefix="transformer.layers.{}.",
    has_bias=False,
)
WHISPER = EncoderFamily(
    subtype="whisper",
    fields=(demand(activation_function="gelu", scale_embedding=False),),
    outside={"conv1": "conv1", "conv2": "conv2", "ln_post": "layer_norm"},
    layer=names_of_layer(
        "self_attn_layer_norm",
        "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
        *("self_attn.out_proj", "final_layer_norm", "fc1", "fc2"),
    ),
    layer_prefix="layers.{}.",
    ignored=("embed_positions.",),  # fixed waves
    has_key_bias=False,
)
# Encoders of images within a larger model, by their model_type in vision_config.
ENCODERS = {
    "clip_vision_model": CLIP,
    "siglip_vision_model": SIGLIP,
    "internvl_vision": INTERNVIT,
    "qwen2_vl_vision": QWEN2_VL,
    "qwen3_vl_vision": QWEN3_VL,
    "qwen3_5_vision": QWEN3_5,
    "pixtral": PIXTRAL,
}
# Their name -> their shape, from ours: some have dimensions that ours lack, or lack some of ours.
_SHAPES: dict[str, Callable[[Sequence[int]], tuple[int, ...]]] = {
    "embeddings.class_embedding": lambda ours: (math.prod(ours),),
    "embeddings.position_embeddings": lambda ours: (1, *ours),
    "vit.embeddings.position_embeddings": lambda ours: (1, *ours),
    # 3 colors and 2 frames of a square
    "patch_embed.proj.weight": lambda ours: (ours[0], 3, 2, *[math.isqrt(ours[1] // 6)] * 2),
    "patch_conv.weight": lambda ours: (ours[0], 3, *[math.isqrt(ours[1] // 3)] * 2),
}


def import_encoder(
    family: EncoderFamily, model: nn.Module, config: Config, weights: Mapping[str, LazyTensor]
) -> dict[str, LazyTensor]:
    """Return the complete tensors of ``model``, which may be on "meta", or a rank's shard of it.

    A bias that theirs lack is zero.  Raises CheckpointError for a tensor that is missing, has
    another shape, or has no counterpart.
    """
    heads: Any = model.config
    found: dict[str, LazyTensor] = {}
    left = {name: t for name, t in weights.items() if not name.startswith(family.ignored)}
    for name, param in model.named_parameters():
        rule = family.rule(name)
        absent = family.absent(rule.theirs, config)
        size = info_of(param).global_shape
        parts = []
        for wanted in rule.split(LazyTensor(name, param.dtype, size, param.detach), heads):
            if wanted.name in left:
                part = left.pop(wanted.name)
                # Theirs may have dimensions of 1 that ours lack.
                is_equal = math.prod(part.shape) == math.prod(wanted.shape)
                parts.append(reshaped(part, wanted.shape) if is_equal else part)
            elif wanted.name in absent:
                dtype = next(iter(weights.values())).dtype
                parts.append(zeros(wanted.name, wanted.shape, dtype))
            else:
                raise CheckpointError(f"the encoder has no tensor {wanted.name}")
        found[name] = rule.join(name, parts, heads, size)
    if left:
        raise CheckpointError(f"{min(left)} has no counterpart in a {family.subtype} encoder")
    return found


def export_encoder(
    family: EncoderFamily, heads: Heads, config: Config, tensors: Mapping[str, LazyTensor]
) -> list[LazyTensor]:
    """Return ``tensors``, complete ones under our names, under theirs.

    Raises CheckpointError if theirs have no bias where ours is not zero.
    """
    out: list[LazyTensor] = []
    for name, tensor in tensors.items():
        rule = family.rule(name)
        absent = family.absent(rule.theirs, config)
        for part in rule.split(tensor, heads):
            if part.name not in absent:
                out.append(reshaped(part, _SHAPES.get(part.name, tuple)(part.shape)))
            elif part.make().any():
                raise CheckpointError(f"{name} is not zero, and their model has no {part.name}")
    return out


VIT_CLASSIFIER = "ViTForImageClassification"
_QKV = " ".join(f"attention.attention.{name}" for name in ("query", "key", "value"))


def _write_labels(flags: Any) -> Values:
    labels = {str(number): f"LABEL_{number}" for number in range(flags.num_classes)}
    back = {label: int(number) for number, label in labels.items()}
    return {"id2label": labels, "label2id": back, "qkv_bias": True}


_VIT = EncoderFamily(
    subtype=VIT_CLASSIFIER,
    fields=(
        demand(hidden_act="gelu", num_channels=3),
        *sizes(12, 768, 3072, 12),
        same("layer_norm_eps", "norm_epsilon", 1e-12),
        same("hidden_dropout_prob", "hidden_dropout", 0.0),
        same("attention_probs_dropout_prob", "attention_dropout", 0.0),
        image_sizes(
            224,
            16,
            lambda flags: {
                "image_size": flags.img_h
                if flags.img_h == flags.img_w
                else [flags.img_h, flags.img_w],
                "patch_size": flags.patch_dim,
            },
        ),
        Field(
            lambda config: {"num_classes": len(config.get("id2label", {0: "", 1: ""}))},
            _write_labels,
        ),
    ),
    outside={
        "class_token": "vit.embeddings.cls_token",
        "conv1": "vit.embeddings.patch_embeddings.projection",
        "position_embeddings.weight": "vit.embeddings.position_embeddings",
        "decoder.final_layernorm": "vit.layernorm",
        "classifier": "classifier",
    },
    layer=names_of_layer(
        *("layernorm_before", _QKV, "attention.output.dense", "layernorm_after"),
        *("intermediate.dense", "output.dense"),
    ),
    layer_prefix="vit.encoder.layer.{}.",
)
# Fields of the layers that have one value in this architecture.
_LAYERS = (
    "activation_func bias_activation_fusion add_bias_linear add_qkv_bias gated_linear_unit "
    "normalization qk_layernorm num_query_groups kv_channels layernorm_zero_centered_gamma "
    "layer_norm_placement"
).split()


def is_image_classifier(config: Config) -> bool:
    """Return whether config.json describes a ViT with a classifier."""
    return config.get("model_type") == "vit" and VIT_CLASSIFIER in config.get("architectures", ())


def flags_of_classifier(config: Config) -> JsonObject:
    """Return the flags, dest -> value, that build the model.  Raises CheckpointError."""
    return {
        "model_kind": "vit",
        "bias_gelu_fusion": False,  # GELU by its formula, not by tanh
        **{"tokenizer_type": "NullTokenizer", "vocab_size": 1},
        **_VIT.flags(config),
    }


def import_classifier(config: Config, weights: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Return the tensors of `ViTClassifier` by name.  Raises CheckpointError."""
    run = run_config(default_args() | flags_of_classifier(config))
    return import_encoder(_VIT, model_on_meta(run, 1), config, weights)


def export_classifier(
    run: RunConfig, weights: Mapping[str, LazyTensor], came_with: Config
) -> tuple[JsonObject, list[LazyTensor]]:
    """Return config.json and their tensors; the reverse of `import_classifier`."""
    config = _config_of(run, came_with)
    return config, export_encoder(_VIT, run.model, config, weights)


def _config_of(run: RunConfig, came_with: Config) -> JsonObject:
    """Return a config.json of the model; the one it came with, if that describes it."""
    values = {**vars(run.vision), **vars(run.model), **vars(run.image_classifier)}
    flags = SimpleNamespace(**values, norm_epsilon=run.model.layernorm_epsilon)
    config: JsonObject = {"architectures": [VIT_CLASSIFIER], "model_type": "vit"}
    for each in _VIT.fields:
        config |= each.write(flags)
    described = flags_of_classifier(config)
    built = run_config(default_args() | described)
    for name in _LAYERS:
        mine = getattr(run.model, name)
        theirs = getattr(built.model, name)
        if mine != theirs:
            raise CheckpointError(f"a {VIT_CLASSIFIER} has {name} {theirs}, and this model {mine}")
    if is_image_classifier(came_with) and flags_of_classifier(came_with) == described:
        return {**came_with}
    return config


_LANGUAGE = "language_model."
# What may precede the names of the encoder, by the class that has written the folder.
_WHISPER_PREFIXES = ("model.encoder.", "encoder.")


def load_parts(model: MimoModel, config: RunConfig) -> MimoModel:
    """Read the weights that --language-model-checkpoint and --audio-encoder-model name.

    A checkpoint of the complete model, which is read later, overrides them.  Raises
    CheckpointError if a checkpoint holds another model.
    """
    if config.mimo.language_model_checkpoint is not None:
        _load_language_model(model, config, config.mimo.language_model_checkpoint)
    if config.mimo.audio_encoder_model is not None and "audios" in model.modality_submodules:
        encoders = model.modality_submodules["audios"].get_submodule("encoders")
        _load_whisper(encoders.get_submodule(AUDIO_ENCODER), config.mimo.audio_encoder_model)
    return model


def _load_language_model(model: MimoModel, config: RunConfig, folder: str) -> None:
    content = open_checkpoint(folder)
    asked = {**config.asked, "model_kind": "gpt", "num_layers": config.model.num_layers}
    compare_models(content.asked, asked, is_finetuning=True).check(content.folder)
    with open_reader(content.folder) as reader:
        for param in model.language_model.parameters():
            info = info_of(param)
            reader.load(from_param(info.name.removeprefix(_LANGUAGE), info, param), cast=True)


@torch.no_grad()
def _load_whisper(encoder: nn.Module, folder: str) -> None:
    config = whisper_config(folder)
    weights = {
        name.removeprefix(prefix): tensor
        for name, tensor in read_weights(Path(folder)).items()
        for prefix in _WHISPER_PREFIXES
        if name.startswith(prefix)
    }
    WHISPER.flags(config)  # refuses what the encoder here does not compute
    found = import_encoder(WHISPER, encoder, config, weights)
    for name, param in encoder.named_parameters():
        whole = found[name].make()
        for offset, view in info_of(param).pieces(param):
            box = tuple(slice(i, i + n) for i, n in zip(offset, view.shape, strict=True))
            view.copy_(whole[box])

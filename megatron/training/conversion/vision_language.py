"""Families of vision-language models: config.json from and to flags.

The language model is described by its own family and the encoder by that of `vision`; a family of
this file describes the projector between the two.  `vision_language_tensors` converts tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from megatron.core.config.errors import CheckpointError
from megatron.core.config.value_types import JsonObject
from megatron.core.datasets.images.tiling import LLAVA_NEXT_GRIDS
from megatron.core.models.vision.kinds import KINDS
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.config.run import RunConfig
from megatron.training.conversion import hf
from megatron.training.conversion.family import Config, Family
from megatron.training.conversion.shape import ModelShape, args_of, shape_of
from megatron.training.conversion.special_tokens import image_token
from megatron.training.conversion.vision import (
    ACTIVATIONS,
    WITHOUT_NORM,
    EncoderFamily,
    layers_of,
    sizes_of,
    subtype_of,
)
from megatron.training.conversion.vision import FAMILIES as ENCODERS
from megatron.training.conversion.vision_qwen import layers_of_qwen
from megatron.training.models.encoders import encoder_config

_OF_ENCODER = (
    "activation_func add_bias_linear ffn_hidden_size gated_linear_unit hidden_size kv_channels "
    "layernorm_epsilon normalization num_attention_heads num_layers num_query_groups "
    "qk_layernorm qk_layernorm_full_width"
).split()
# Entries that folders omit if the class of `transformers` has this default.
_LLAMA: Config = {
    **{"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32},
    **{"num_attention_heads": 32, "max_position_embeddings": 2048, "vocab_size": 32000},
}
_CLIP: Config = {
    **{"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12},
    **{"num_attention_heads": 12, "image_size": 224, "hidden_act": "quick_gelu"},
}
_DEFAULTS: Mapping[str, Config] = {
    "llama": _LLAMA,
    "mistral": {**_LLAMA, "intermediate_size": 14336, "num_key_value_heads": 8},
    "clip_vision_model": {**_CLIP, "patch_size": 32},
    "siglip_vision_model": {
        **{"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12},
        **{"num_attention_heads": 12, "image_size": 224, "patch_size": 16},
        **{"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6},
    },
    "internvl_vision": {
        **{"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24},
        **{"num_attention_heads": 16, "image_size": 448, "patch_size": 14},
        **{"hidden_act": "gelu", "attention_bias": False},
    },
}


_QWEN_ONLY: Config = {"spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3}
_QWEN: Config = {
    **{"depth": 32, "embed_dim": 1280, "hidden_size": 3584, "mlp_ratio": 4, "num_heads": 16},
    **{"patch_size": 14, "hidden_act": "quick_gelu"},
    **_QWEN_ONLY,
}


@dataclass(frozen=True, kw_only=True)
class VisionLanguageFamily:
    """Names and defaults of one family; ``projector``: our modules -> theirs.

    ``merges_neighbours``: the projector reads 2 x 2 patches as one.  ``has_newline``: rows of tiles
    end with an embedding (see `TileArrangement`).
    """

    model_type: str
    architecture: str
    projector: Mapping[str, str]
    text: str  # model_type of the language model, if config.json has none
    images: str  # model_type of the encoder, if config.json has none
    image_token: str = "image_token_index"  # noqa: S105  its entry in config.json
    feature_layer: int = -2
    is_tied: bool = False
    merges_neighbours: bool = False
    has_newline: bool = False
    inner_prefix: str = ""  # of the encoder's tensors, as released folders have it
    reads_any_size: bool = False  # Qwen2-VL's encoder and projector, of `vision_qwen`


_PROJECTOR = {
    f"vision_projection.encoder.linear_fc{n}": f"multi_modal_projector.linear_{n}" for n in (1, 2)
}
LLAVA = VisionLanguageFamily(
    model_type="llava",
    architecture="LlavaForConditionalGeneration",
    projector=_PROJECTOR,
    text="llama",
    images="clip_vision_model",
    inner_prefix="vision_model.",
)
INTERNVL = VisionLanguageFamily(
    model_type="internvl",
    architecture="InternVLForConditionalGeneration",
    projector={"vision_projection.norm": "multi_modal_projector.layer_norm", **_PROJECTOR},
    text="qwen2",
    images="internvl_vision",
    image_token="image_token_id",  # noqa: S106
    feature_layer=-1,
    is_tied=True,
    merges_neighbours=True,
)
LLAVA_NEXT = replace(
    LLAVA,
    model_type="llava_next",
    architecture="LlavaNextForConditionalGeneration",
    has_newline=True,
)
QWEN2_VL = VisionLanguageFamily(
    model_type="qwen2_vl",
    architecture="Qwen2VLForConditionalGeneration",
    projector={},
    text="qwen2_vl_text",
    images="qwen2_vl_vision",
    image_token="image_token_id",  # noqa: S106
    reads_any_size=True,
)
FAMILIES = {family.model_type: family for family in (LLAVA, LLAVA_NEXT, INTERNVL, QWEN2_VL)}


@dataclass(frozen=True, kw_only=True)
class VisionLanguageShape:
    """What a config.json of a vision-language model describes.

    ``text_config``: config.json of the language model.  ``images``: that of the encoder, without
    the last ``num_unused_layers`` layers, whose output nothing reads.
    """

    family: VisionLanguageFamily
    text_family: Family
    text_config: Config
    text: ModelShape
    images: Config
    num_unused_layers: int
    drops_class_token: bool
    image_token: int  # id of the token that stands for an embedding of an image
    grids: tuple[int, ...] = ()  # heights and widths to which images are padded, as pairs

    @property
    def encoder_family(self) -> EncoderFamily:
        """Return the family of the encoder."""
        return {**ENCODERS, **WITHOUT_NORM}[self.images["model_type"]]


def is_vision_language(config: Config) -> bool:
    """Return whether config.json is that of a family of this file."""
    return config.get("model_type") in FAMILIES


def shape_of_config(config: Config) -> VisionLanguageShape:
    """Return what config.json describes.  Raises CheckpointError if it cannot be converted."""
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        raise CheckpointError(
            f"config.json has model_type {config.get('model_type')}: the vision-language families "
            f"are {', '.join(FAMILIES)}"
        )
    if family.reads_any_size:
        return _shape_of_qwen(config, family)
    text = _part(config, "text_config", family.text)
    images = _part(config, "vision_config", family.images)
    if images["model_type"] not in ENCODERS:
        raise CheckpointError(
            f"vision_config has model_type {images['model_type']}: the encoders of images are "
            f"{', '.join(ENCODERS)}"
        )
    kind = KINDS.get(ENCODERS[images["model_type"]].subtype)
    if images["model_type"] == "siglip_vision_model" and not family.merges_neighbours:
        images["model_type"] = "siglip_without_norm"
    elif kind is None or kind.has_norm_after:
        raise CheckpointError(
            f"vision_config has model_type {images['model_type']}: {family.architecture} reads its "
            "features before its last norm, which the encoder here applies; only "
            "clip_vision_model, siglip_vision_model (not within InternVL) and internvl_vision can "
            "be converted within a larger model"
        )
    if kind is not None and not kind.has_class_token and _drops_class_token(config):
        raise CheckpointError(
            "config.json has vision_feature_select_strategy default, which drops a class token, "
            f"and the encoder ({images['model_type']}) has none: only full can be converted"
        )
    _complete_text(text, config, family)
    text_family = hf.family_of(text)
    num_layers = images["num_hidden_layers"]
    num_used = _num_used_layers(config, family, num_layers)
    if family.merges_neighbours and config.get("downsample_ratio", 0.5) != 0.5:
        raise CheckpointError(
            f"config.json has downsample_ratio {config['downsample_ratio']}: only 0.5 can be "
            "converted"
        )
    for name, value in (("projector_hidden_act", "gelu"), ("multimodal_projector_bias", True)):
        if config.get(name, value) != value:
            raise CheckpointError(
                f"config.json has {name} {config[name]}: only {value} can be converted"
            )
    return VisionLanguageShape(
        family=family,
        text_family=text_family,
        text_config=text,
        text=text_family.shape(text),
        images={**images, "num_hidden_layers": num_used},
        num_unused_layers=num_layers - num_used,
        drops_class_token=_drops_class_token(config),
        image_token=config[family.image_token],
        grids=_grids_of(config) if family.has_newline else (),
    )


def _complete_text(text: JsonObject, config: Config, family: VisionLanguageFamily) -> None:
    tied = config.get("tie_word_embeddings", family.is_tied) or text.get("tie_word_embeddings")
    text["tie_word_embeddings"] = bool(tied)


def _shape_of_qwen(config: Config, family: VisionLanguageFamily) -> VisionLanguageShape:
    """Return what Qwen2-VL's config.json describes; released ones hold the text's entries."""
    of_text = config.get("text_config", {k: v for k, v in config.items() if k != "vision_config"})
    text = {**of_text, "model_type": family.text}
    _complete_text(text, config, family)
    images = {**_QWEN, **_part(config, "vision_config", family.images)}
    for name, value in _QWEN_ONLY.items():
        if images[name] != value:
            raise CheckpointError(
                f"vision_config has {name} {images[name]}: only {value} can be converted"
            )
    text_family = hf.family_of(text)
    return VisionLanguageShape(
        family=family,
        text_family=text_family,
        text_config=text,
        text=text_family.shape(text),
        images=images,
        num_unused_layers=0,
        drops_class_token=False,
        image_token=config[family.image_token],
    )


def _part(config: Config, name: str, model_type: str) -> JsonObject:
    """Return the config.json of a part, completed by the defaults of its class."""
    part = config.get(name)
    if not isinstance(part, dict):
        raise CheckpointError(f"config.json has no {name}")
    kind = str(part.get("model_type", model_type))
    return {**_DEFAULTS.get(kind, {}), **part, "model_type": kind}


def _num_used_layers(config: Config, family: VisionLanguageFamily, num_layers: int) -> int:
    """Return the layers before the output that the projector reads; -1 is that of the last."""
    layer = config.get("vision_feature_layer", family.feature_layer)
    if not isinstance(layer, int) or not -num_layers <= layer <= num_layers or layer == 0:
        raise CheckpointError(
            f"config.json has vision_feature_layer {layer}: only one layer of {num_layers} can be "
            "converted, -1 for the last"
        )
    return layer if layer > 0 else num_layers + 1 + layer


def _grids_of(config: Config) -> tuple[int, ...]:
    """Return the heights and widths to which images are padded, as pairs in one list."""
    pairs = config.get("image_grid_pinpoints", LLAVA_NEXT_GRIDS)
    return tuple(side for pair in pairs for side in pair)


def _drops_class_token(config: Config) -> bool:
    strategy = config.get("vision_feature_select_strategy", "default")
    if strategy not in ("default", "full"):
        raise CheckpointError(
            f"config.json has vision_feature_select_strategy {strategy}: only default and full can "
            "be converted"
        )
    return bool(strategy == "default")


def flags_of(shape: VisionLanguageShape) -> dict[str, object]:
    """Return the flags, dest -> value, that build the model."""
    layers = encoder_layers(shape)
    common: dict[str, object] = {
        **args_of(shape.text),
        "model_kind": "vlm",
        "vision_num_layers": layers.num_layers,
        "vision_hidden_size": layers.hidden_size,
        "vision_ffn_hidden_size": layers.ffn_hidden_size,
        "vision_num_attention_heads": layers.num_attention_heads,
    }
    if shape.family.reads_any_size:
        side = shape.images["patch_size"]
        return common | {"vision_model_type": "qwen2_vl", "patch_dim": side}
    height, width, patch_dim = sizes_of(shape.images)
    return {
        **common,
        "vision_model_type": subtype_of(shape.images),
        **{"img_h": height, "img_w": width, "patch_dim": patch_dim},
        "disable_vision_class_token": shape.drops_class_token,
        "pixel_shuffle": shape.family.merges_neighbours,
        "vision_projection_type": "mlp",
        "image_grid_pinpoints": shape.grids,
    }


def encoder_layers(shape: VisionLanguageShape) -> TransformerConfig:
    """Return the config of the encoder's layers."""
    if shape.family.reads_any_size:
        return layers_of_qwen(shape.images)
    return layers_of(shape.images)


def config_of(run: RunConfig, vocab_size: int, came_with: Config) -> JsonObject:
    """Return a config.json of the model that ``run`` builds.

    ``came_with``: the config.json that the model was imported with, or {}; it is used if it still
    describes the model.  Raises CheckpointError if no family is this model.
    """
    if run.asked.get("vision_model_type") is None:
        raise CheckpointError(
            "the encoder has the layers of the language model, as without --vision-model-type: no "
            "Hugging Face family has such a model"
        )
    config: JsonObject = {**came_with}
    if not is_vision_language(came_with) or _differences(came_with, run, vocab_size):
        config = _new_config(run, vocab_size)
        if different := _differences(config, run, vocab_size):
            raise CheckpointError(
                f"no Hugging Face family is this model: the nearest, {config['architectures'][0]}, "
                f"has no {', '.join(different)}"
            )
    if "text_config" in config:
        config["text_config"] = {**config["text_config"], "vocab_size": vocab_size}
    else:  # a released Qwen2-VL
        config["vocab_size"] = vocab_size
    check_encoder(shape_of_config(config), run)
    return config


def _differences(config: Config, run: RunConfig, vocab_size: int) -> list[str]:
    """Return the flags of ``run`` that config.json does not describe."""
    shape = shape_of_config(config)
    flags = flags_of(shape)
    found = [
        f"{name} {value}"
        for name, value in vars(run.vision).items()
        if name in flags and flags[name] != value
    ]
    length = shape.text.max_position_embeddings  # of the run: with the embeddings of images
    text = replace(_text_of(run, vocab_size), max_position_embeddings=length)
    return found + list(text.differences(replace(shape.text, vocab_size=vocab_size)))


def _text_of(run: RunConfig, vocab_size: int) -> ModelShape:
    return replace(shape_of(run, vocab_size), kind="gpt")


def _new_config(run: RunConfig, vocab_size: int) -> JsonObject:
    """Return a config.json for the model that ``run`` builds, of the family it is nearest to."""
    vision = run.vision
    layers = encoder_config(run)
    family = INTERNVL if vision.vision_model_type.startswith("internvit") else LLAVA
    if vision.grids:
        family = LLAVA_NEXT
    text = _text_of(run, vocab_size)
    if vision.vision_model_type == "qwen2_vl":
        return _new_qwen(run, text)
    text_family = hf.choose_family(text, None)
    names = {function: name for name, function in ACTIVATIONS.items()}
    images: JsonObject = {
        "model_type": family.images,
        "num_hidden_layers": layers.num_layers,
        "hidden_size": layers.hidden_size,
        "intermediate_size": layers.ffn_hidden_size,
        "num_attention_heads": layers.num_attention_heads,
        "hidden_act": names[layers.activation_func],
        "layer_norm_eps": layers.layernorm_epsilon,
        "image_size": vision.img_h,
        "patch_size": vision.patch_dim,
    }
    config: JsonObject = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        family.image_token: image_token(run),
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": (
            "default" if vision.disable_vision_class_token else "full"
        ),
        "projector_hidden_act": "gelu",
        "tie_word_embeddings": text.is_tied,
        "text_config": text_family.config(text),
        "vision_config": images,
    }
    if vision.vision_model_type == "siglip_without_norm":
        images |= {"model_type": "siglip_vision_model", "vision_use_head": False}
    if vision.grids:
        config["image_grid_pinpoints"] = [list(grid) for grid in vision.grids]
    if family is INTERNVL:
        is_rms = layers.normalization == "RMSNorm"
        images["norm_type"] = "rms_norm" if is_rms else "layer_norm"
        images |= {"use_qk_norm": layers.qk_layernorm_full_width, "attention_bias": True}
        images["image_size"] = [vision.img_h, vision.img_w]
        images["patch_size"] = [vision.patch_dim, vision.patch_dim]
        config["downsample_ratio"] = 0.5
    return config


def _new_qwen(run: RunConfig, text: ModelShape) -> JsonObject:
    layers = encoder_config(run)
    assert layers.ffn_hidden_size is not None, "it is derived"
    return {
        "architectures": [QWEN2_VL.architecture],
        "model_type": QWEN2_VL.model_type,
        QWEN2_VL.image_token: image_token(run),
        "tie_word_embeddings": text.is_tied,
        "text_config": hf.family_of({"model_type": QWEN2_VL.text}).config(text),
        "vision_config": {
            **_QWEN,
            "model_type": QWEN2_VL.images,
            "depth": layers.num_layers,
            "embed_dim": layers.hidden_size,
            "hidden_size": text.hidden_size,
            "mlp_ratio": layers.ffn_hidden_size // layers.hidden_size,
            "num_heads": layers.num_attention_heads,
            "patch_size": run.vision.patch_dim,
        },
    }


def check_encoder(shape: VisionLanguageShape, run: RunConfig) -> None:
    """Raise CheckpointError unless the encoder that ``run`` builds is that of ``shape``."""
    found = encoder_config(run)
    wanted = encoder_layers(shape)
    for name in _OF_ENCODER:
        mine = getattr(found, name)
        theirs = getattr(wanted, name)
        if mine != theirs:
            raise CheckpointError(
                f"vision_config asks for {name} {theirs}, and --vision-model-type "
                f"{run.vision.vision_model_type} has {mine}"
            )

"""Vision-language models from Hugging Face and back: an encoder, a projector, a language model.

The language model is converted by its own family and the encoder by that of `vision`; a family of
this file names the parts of a folder and describes what is between the two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from megatron.core.config.errors import CheckpointError
from megatron.core.dist_checkpointing.safetensors_file import LazyTensor
from megatron.core.dist_checkpointing.value_types import JsonObject
from megatron.core.models.vision.multimodal_projector import get_projector_spec
from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_local_spec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.conversion import hf
from megatron.training.conversion.family import Config, Family
from megatron.training.conversion.shape import ModelShape, args_of
from megatron.training.conversion.verify import groups_of_one_rank
from megatron.training.conversion.vision import (
    ACTIVATIONS,
    EncoderFamily,
    build_encoder,
    export_encoder,
    import_encoder,
    layers_of,
    sizes_of,
    subtype_of,
)
from megatron.training.conversion.vision import FAMILIES as ENCODERS

_TEXT, _IMAGES = "language_model.", "vision_tower."
_OUR_TEXT, _OUR_IMAGES = "language_model.", "vision_model."
# Beginnings of names as releases of `transformers` have written them -> as they are read here.
_SPELLINGS = (
    ("model.language_model.", "language_model.model."),
    ("model.", ""),
    ("lm_head.", "language_model.lm_head."),
    ("vision_tower.vision_model.", _IMAGES),
)
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
    "internvl_vision": {
        **{"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24},
        **{"num_attention_heads": 16, "image_size": 448, "patch_size": 14},
        **{"hidden_act": "gelu", "attention_bias": False},
    },
}


@dataclass(frozen=True, kw_only=True)
class VisionLanguageFamily:
    """Names and defaults of one family; ``projector``: our modules -> theirs.

    ``merges_neighbours``: the projector reads 2 x 2 patches as one.
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
    inner_prefix: str = ""  # of the encoder's tensors, as released folders have it


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
FAMILIES = {family.model_type: family for family in (LLAVA, INTERNVL)}


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
    projector_activation: str
    projector_has_bias: bool
    image_token: int  # id of the token that stands for an embedding of an image

    @property
    def encoder_family(self) -> EncoderFamily:
        """Return the family of the encoder."""
        return ENCODERS[self.images["model_type"]]


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
    text = _part(config, "text_config", family.text)
    images = _part(config, "vision_config", family.images)
    if images["model_type"] not in ENCODERS:
        raise CheckpointError(
            f"vision_config has model_type {images['model_type']}: the encoders of images are "
            f"{', '.join(ENCODERS)}"
        )
    tied = config.get("tie_word_embeddings", family.is_tied) or text.get("tie_word_embeddings")
    text["tie_word_embeddings"] = bool(tied)
    text_family = hf.family_of(text)
    num_layers = images["num_hidden_layers"]
    num_used = _num_used_layers(config, family, num_layers)
    if family.merges_neighbours and config.get("downsample_ratio", 0.5) != 0.5:
        raise CheckpointError(
            f"config.json has downsample_ratio {config['downsample_ratio']}: only 0.5 can be "
            "converted"
        )
    activation = config.get("projector_hidden_act", "gelu")
    if activation not in ACTIVATIONS:
        raise CheckpointError(
            f"config.json has projector_hidden_act {activation}: only {', '.join(ACTIVATIONS)} can "
            "be converted"
        )
    return VisionLanguageShape(
        family=family,
        text_family=text_family,
        text_config=text,
        text=text_family.shape(text),
        images={**images, "num_hidden_layers": num_used},
        num_unused_layers=num_layers - num_used,
        drops_class_token=_drops_class_token(config),
        projector_activation=activation,
        projector_has_bias=bool(config.get("multimodal_projector_bias", True)),
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
    layers = layers_of(shape.images)
    height, width, patch_dim = sizes_of(shape.images)
    return {
        **args_of(shape.text),
        "model_kind": "vlm",
        "vision_model_type": subtype_of(shape.images),
        "vision_num_layers": layers.num_layers,
        "vision_hidden_size": layers.hidden_size,
        "vision_ffn_hidden_size": layers.ffn_hidden_size,
        "vision_num_attention_heads": layers.num_attention_heads,
        **{"img_h": height, "img_w": width, "patch_dim": patch_dim},
        "disable_vision_class_token": shape.drops_class_token,
        "pixel_shuffle": shape.family.merges_neighbours,
        "vision_projection_type": "mlp",
    }


def llava_arguments(
    shape: VisionLanguageShape, language: TransformerConfig, **changes: Any
) -> dict[str, Any]:
    """Return the arguments of `LLaVAModel` that describe the encoder and the projector.

    ``language``: config of the language model.  ``changes``: fields of the encoder's and the
    projector's config, such as the precision.
    """
    layers = layers_of(shape.images, **changes)
    height, width, patch_dim = sizes_of(shape.images)
    scaled = shape.encoder_family.has_layer_scale
    return {
        "vision_transformer_config": layers,
        "vision_transformer_layer_spec": get_vit_layer_with_local_spec(
            layers, has_layer_scale=scaled
        ),
        "drop_vision_class_token": shape.drops_class_token,
        "vision_projection_config": projector_config(shape, language.hidden_size, **changes),
        "vision_projection_layer_spec": get_projector_spec(
            has_norm="vision_projection.norm" in shape.family.projector
        ),
        "vision_projection_type": "mlp",
        **{"img_h": height, "img_w": width, "patch_dim": patch_dim},
        "pixel_shuffle": shape.family.merges_neighbours,
        "vision_model_subtype": subtype_of(shape.images),
    }


def projector_config(
    shape: VisionLanguageShape, hidden_size: int, **changes: Any
) -> TransformerConfig:
    """Return the config of the projector: two layers as wide as the language model."""
    return TransformerConfig(
        **{
            "num_layers": 1,
            "hidden_size": hidden_size,
            "num_attention_heads": 1,
            "ffn_hidden_size": hidden_size,
            "activation_func": ACTIVATIONS[shape.projector_activation],
            "bias_activation_fusion": False,  # it would replace GELU by its approximation
            "add_bias_linear": shape.projector_has_bias,
            **changes,
        }
    )


def import_tensors(
    shape: VisionLanguageShape, weights: Mapping[str, LazyTensor]
) -> dict[str, LazyTensor]:
    """Return `LLaVAModel`'s tensors by their global names.

    Raises CheckpointError unless each of their tensors is used once, apart from layers whose output
    nothing reads, and each of ours is complete.
    """
    parts: dict[str, dict[str, LazyTensor]] = {_TEXT: {}, _IMAGES: {}, "": {}}
    for name, tensor in weights.items():
        name = _respelled(name)
        prefix = next(each for each in parts if name.startswith(each))
        parts[prefix][name.removeprefix(prefix)] = tensor
    text = hf.import_model(shape.text_config, parts[_TEXT])
    out = {f"{_OUR_TEXT}{name}": tensor for name, tensor in text.tensors.items()}
    unused = tuple(_unused_layers(shape))
    images = {name: t for name, t in parts[_IMAGES].items() if not name.startswith(unused)}
    found = import_encoder(_encoder_on_meta(shape), shape.images, images)
    out |= {f"{_OUR_IMAGES}{name}": tensor for name, tensor in found.items()}
    out |= dict(_projector_tensors(shape, parts[""]))
    if parts[""]:
        raise CheckpointError(
            f"{next(iter(parts['']))} has no place in a {shape.family.architecture}"
        )
    return {name: replace(tensor, name=name) for name, tensor in out.items()}


def _respelled(name: str) -> str:
    for old, new in _SPELLINGS:
        if name.startswith(old):
            name = new + name.removeprefix(old)
    return name


def _unused_layers(shape: VisionLanguageShape) -> Iterator[str]:
    """Yield the prefixes of the encoder's layers whose output nothing reads."""
    first = shape.images["num_hidden_layers"]
    for number in range(first, first + shape.num_unused_layers):
        yield shape.encoder_family.layer_prefix.format(number)


def _encoder_on_meta(shape: VisionLanguageShape) -> Any:
    with torch.device("meta"):
        return build_encoder(shape.images, groups_of_one_rank())


def _projector_tensors(
    shape: VisionLanguageShape, left: dict[str, LazyTensor]
) -> Iterator[tuple[str, LazyTensor]]:
    """Yield our names and tensors of the projector, and remove these from ``left``."""
    for ours, theirs in _projector_names(shape).items():
        if theirs not in left:
            raise CheckpointError(
                f"the weights have no {theirs}, which a {shape.family.architecture} needs"
            )
        yield ours, left.pop(theirs)


def _projector_names(shape: VisionLanguageShape) -> dict[str, str]:
    """Return our name -> theirs of each tensor of the projector."""
    return {
        f"{ours}.{kind}": f"{theirs}.{kind}"
        for ours, theirs in shape.family.projector.items()
        for kind in ("weight", "bias")
        if kind == "weight" or shape.projector_has_bias or ours.endswith("norm")
    }


def export_tensors(
    shape: VisionLanguageShape, tensors: Mapping[str, LazyTensor]
) -> list[LazyTensor]:
    """Return their tensors, as released folders name them; the reverse of `import_tensors`.

    Tensors of layers whose output nothing reads are zero.  Raises CheckpointError unless
    ``tensors`` are those of ``shape``.
    """
    text = {n: t for n, t in tensors.items() if n.startswith(_OUR_TEXT)}
    images = {n: t for n, t in tensors.items() if n.startswith(_OUR_IMAGES)}
    out = [
        replace(tensor, name=_TEXT + tensor.name)
        for tensor in hf.export_model(
            shape.text, _without_prefix(text, _OUR_TEXT), shape.text_family
        )
    ]
    encoder = _encoder_on_meta(shape)
    prefix = _IMAGES + shape.family.inner_prefix
    found = export_encoder(encoder, shape.images, _without_prefix(images, _OUR_IMAGES))
    found += [_zeros(name, like) for name, like in _blank(shape, found)]
    out += [replace(tensor, name=prefix + tensor.name) for tensor in found]
    names = _projector_names(shape)
    if left := tensors.keys() - text.keys() - images.keys() ^ names.keys():
        raise CheckpointError(
            f"the checkpoint does not hold a {shape.family.architecture}: {', '.join(sorted(left))}"
        )
    return out + [replace(tensors[ours], name=theirs) for ours, theirs in names.items()]


def _without_prefix(tensors: Mapping[str, LazyTensor], prefix: str) -> dict[str, LazyTensor]:
    return {
        (short := name.removeprefix(prefix)): replace(tensor, name=short)
        for name, tensor in tensors.items()
    }


def _blank(shape: VisionLanguageShape, found: list[LazyTensor]) -> Iterator[tuple[str, LazyTensor]]:
    """Yield the names of tensors that nothing reads, each with one of the same shape and dtype."""
    first = shape.encoder_family.layer_prefix.format(0)
    for layer in _unused_layers(shape):
        for tensor in found:
            if tensor.name.startswith(first):
                yield layer + tensor.name.removeprefix(first), tensor
    for name, like in shape.encoder_family.unread.items():
        yield name, next(tensor for tensor in found if tensor.name == like)


def _zeros(name: str, like: LazyTensor) -> LazyTensor:
    return LazyTensor(
        name, like.dtype, like.shape, partial(torch.zeros, like.shape, dtype=like.dtype)
    )

"""Families of vision-language models: config.json from and to flags, and tensors part by part.

The language model is described by its own family and the encoder by that of `vision`; a family of
this file describes the projector between the two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from megatron.core.config.errors import CheckpointError
from megatron.core.config.value_types import JsonObject
from megatron.core.datasets.images import LLAVA_NEXT_GRIDS
from megatron.core.dist_checkpointing.safetensors_file import LazyTensor
from megatron.core.models.vision.kinds import KINDS
from megatron.training.config.run import RunConfig
from megatron.training.conversion import hf
from megatron.training.conversion.family import Config, Family
from megatron.training.conversion.lazy import reshaped, zeros
from megatron.training.conversion.shape import ModelShape, args_of, shape_of
from megatron.training.conversion.source import image_token
from megatron.training.conversion.vision import (
    ACTIVATIONS,
    encoder_on_meta,
    export_encoder,
    family_of,
    import_encoder,
    layers_of,
    sizes_of,
    subtype_of,
)
from megatron.training.conversion.vision import FAMILIES as ENCODERS
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


_QWEN_ONLY: Config = {
    **{"hidden_act": "quick_gelu", "spatial_merge_size": 2, "temporal_patch_size": 2},
    "in_channels": 3,
}
_QWEN: Config = {
    **{"depth": 32, "embed_dim": 1280, "hidden_size": 3584, "mlp_ratio": 4, "num_heads": 16},
    "patch_size": 14,
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
    text_prefix: str = "language_model."  # of names in released folders, as the next
    images_prefix: str = "vision_tower."
    reads_any_size: bool = False  # Qwen2-VL's encoder reads patches of images as they are


_PROJECTOR = {
    f"vision_projection.encoder.linear_fc{n}": f"multi_modal_projector.linear_{n}" for n in (1, 2)
}
LLAVA = VisionLanguageFamily(
    model_type="llava",
    architecture="LlavaForConditionalGeneration",
    projector=_PROJECTOR,
    text="llama",
    images="clip_vision_model",
    images_prefix="vision_tower.vision_model.",
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
    projector={
        "vision_projection.encoder.linear_fc1": "visual.merger.mlp.0",
        "vision_projection.encoder.linear_fc2": "visual.merger.mlp.2",
    },
    text="qwen2_vl_text",
    images="qwen2_vl_vision",
    image_token="image_token_id",  # noqa: S106
    text_prefix="",
    images_prefix="visual.",
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
    drops_class_token = False
    num_unused = 0
    if family.reads_any_size:  # released folders hold the entries of the text in config.json itself
        whole = {name: value for name, value in config.items() if name != "vision_config"}
        text = {**config.get("text_config", whole), "model_type": family.text}
        images = {**_QWEN, **_part(config, "vision_config", family.images)}
        images["model_type"] = family.images
        _demand(images, "vision_config", _QWEN_ONLY)
    else:
        text = _part(config, "text_config", family.text)
        drops_class_token = _drops_class_token(config)
        images = _images_of(config, family, drops_class_token)
        num_layers = images["num_hidden_layers"]
        images["num_hidden_layers"] = _num_used_layers(config, family, num_layers)
        num_unused = num_layers - images["num_hidden_layers"]
        _demand(config, "config.json", {"projector_hidden_act": "gelu"})
        _demand(config, "config.json", {"multimodal_projector_bias": True})
    if family.merges_neighbours:
        _demand(config, "config.json", {"downsample_ratio": 0.5})
    tied = config.get("tie_word_embeddings", family.is_tied) or text.get("tie_word_embeddings")
    text["tie_word_embeddings"] = bool(tied)
    text_family = hf.family_of(text)
    pairs = config.get("image_grid_pinpoints", LLAVA_NEXT_GRIDS) if family.has_newline else ()
    return VisionLanguageShape(
        family=family,
        text_family=text_family,
        text_config=text,
        text=text_family.shape(text),
        images=images,
        num_unused_layers=num_unused,
        drops_class_token=drops_class_token,
        image_token=config[family.image_token],
        grids=tuple(side for pair in pairs for side in pair),
    )


def _demand(config: Config, where: str, values: Config) -> None:
    """Raise CheckpointError unless ``config`` has these values, the only ones, or none."""
    for name, value in values.items():
        if config.get(name, value) != value:
            raise CheckpointError(
                f"{where} has {name} {config[name]}: only {value} can be converted"
            )


def _images_of(config: Config, family: VisionLanguageFamily, drops_class_token: bool) -> JsonObject:
    """Return the config.json of the encoder, all layers of it."""
    images = _part(config, "vision_config", family.images)
    name = images["model_type"]
    if name not in ENCODERS:
        raise CheckpointError(
            f"vision_config has model_type {name}: the encoders of images are {', '.join(ENCODERS)}"
        )
    kind = KINDS.get(ENCODERS[name].subtype)
    if name == "siglip_vision_model" and not family.merges_neighbours:
        images["model_type"] = "siglip_without_norm"
    elif kind is None or kind.has_norm_after:
        raise CheckpointError(
            f"vision_config has model_type {name}: {family.architecture} reads its features before "
            "its last norm, which the encoder here applies; only clip_vision_model, "
            "siglip_vision_model (not within InternVL) and internvl_vision can be converted within "
            "a larger model"
        )
    if kind is not None and not kind.has_class_token and drops_class_token:
        raise CheckpointError(
            "config.json has vision_feature_select_strategy default, which drops a class token, "
            f"and the encoder ({name}) has none: only full can be converted"
        )
    return images


def _part(config: Config, name: str, model_type: str) -> JsonObject:
    """Return the config.json of a part, completed by the defaults of its class."""
    part = config.get(name)
    if not isinstance(part, dict):
        raise CheckpointError(f"config.json has no {name}")
    kind = str(part.get("model_type", model_type))
    return {**_DEFAULTS.get(kind, {}), **part, "model_type": kind}


def _num_used_layers(config: Config, family: VisionLanguageFamily, num_layers: int) -> int:
    """Return how many encoder layers run before the projector (vision_feature_layer)."""
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
    common: dict[str, object] = {
        **args_of(shape.text),
        "model_kind": "vlm",
        "vision_num_layers": layers.num_layers,
        "vision_hidden_size": layers.hidden_size,
        "vision_ffn_hidden_size": layers.ffn_hidden_size,
        "vision_num_attention_heads": layers.num_attention_heads,
    }
    if shape.family.reads_any_size:
        return common | {"vision_model_type": "qwen2_vl", "patch_dim": shape.images["patch_size"]}
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


def _text_of(config: RunConfig, vocab_size: int) -> ModelShape:
    return replace(shape_of(config, vocab_size), kind="gpt")


def _new_config(run: RunConfig, vocab_size: int) -> JsonObject:
    """Return a config.json for the model that ``run`` builds, of the family it is nearest to."""
    vision = run.vision
    layers = encoder_config(run)
    text = _text_of(run, vocab_size)
    family = INTERNVL if vision.vision_model_type.startswith("internvit") else LLAVA
    if vision.grids:
        family = LLAVA_NEXT
    more: JsonObject = {}
    if vision.vision_model_type == "qwen2_vl":
        family = QWEN2_VL
        text_family = hf.family_of({"model_type": family.text})
        assert layers.ffn_hidden_size is not None, "it is derived"
        images: JsonObject = {
            **_QWEN,
            "model_type": family.images,
            "depth": layers.num_layers,
            "embed_dim": layers.hidden_size,
            "hidden_size": text.hidden_size,
            "mlp_ratio": layers.ffn_hidden_size // layers.hidden_size,
            "num_heads": layers.num_attention_heads,
            "patch_size": vision.patch_dim,
        }
    else:
        text_family = hf.choose_family(text, None)
        names = {function: name for name, function in ACTIVATIONS.items()}
        images = {
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
        drops_class_token = vision.disable_vision_class_token
        more = {
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "default" if drops_class_token else "full",
            "projector_hidden_act": "gelu",
        }
    if vision.vision_model_type == "siglip_without_norm":
        images |= {"model_type": "siglip_vision_model", "vision_use_head": False}
    if vision.grids:
        more["image_grid_pinpoints"] = [list(grid) for grid in vision.grids]
    if family is INTERNVL:
        is_rms = layers.normalization == "RMSNorm"
        images |= {
            "norm_type": "rms_norm" if is_rms else "layer_norm",
            "use_qk_norm": layers.qk_layernorm_full_width,
            "attention_bias": True,
            "image_size": [vision.img_h, vision.img_w],
            "patch_size": [vision.patch_dim, vision.patch_dim],
        }
        more["downsample_ratio"] = 0.5
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        family.image_token: image_token(run),
        "tie_word_embeddings": text.is_tied,
        "text_config": text_family.config(text),
        "vision_config": images,
        **more,
    }


def check_encoder(shape: VisionLanguageShape, config: RunConfig) -> None:
    """Raise CheckpointError unless the encoder that ``config`` builds is that of ``shape``."""
    found = encoder_config(config)
    wanted = layers_of(shape.images)
    for name in _OF_ENCODER:
        mine = getattr(found, name)
        theirs = getattr(wanted, name)
        if mine != theirs:
            raise CheckpointError(
                f"vision_config asks for {name} {theirs}, and --vision-model-type "
                f"{config.vision.vision_model_type} has {mine}"
            )


_TEXT = "language_model."
_IMAGES = "vision_tower."
_NEWLINE = "image_newline.weight"
# Tensors of SigLIP's norm and pooling head, which LLaVA does not read: name -> sizes.
_UNREAD_OF_SIGLIP = {
    **{"post_layernorm.weight": "h", "post_layernorm.bias": "h", "head.probe": "1 1 h"},
    **{"head.attention.in_proj_weight": "3h h", "head.attention.in_proj_bias": "3h"},
    **{"head.attention.out_proj.weight": "h h", "head.attention.out_proj.bias": "h"},
    **{"head.layernorm.weight": "h", "head.layernorm.bias": "h"},
    **{"head.mlp.fc1.weight": "f h", "head.mlp.fc1.bias": "f"},
    **{"head.mlp.fc2.weight": "h f", "head.mlp.fc2.bias": "h"},
}
_OUR_TEXT = "language_model."
_OUR_IMAGES = "vision_model."
# Beginnings of names as releases of `transformers` have written them -> as they are read here.
_SPELLINGS = (
    ("model.language_model.", "language_model.model."),
    *((f"model.{part}.", f"{_TEXT}model.{part}.") for part in ("embed_tokens", "layers", "norm")),
    ("model.", ""),
    *(
        (f"visual.{part}.", f"{_IMAGES}{part}.")
        for part in ("patch_embed", "blocks", "merger.ln_q")
    ),
    ("lm_head.", "language_model.lm_head."),
    ("vision_tower.vision_model.", _IMAGES),
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
        for old, new in _SPELLINGS:
            if name.startswith(old):
                name = new + name.removeprefix(old)
        prefix = next(each for each in parts if name.startswith(each))
        parts[prefix][name.removeprefix(prefix)] = tensor
    text = hf.import_model(shape.text_config, parts[_TEXT])
    out = {f"{_OUR_TEXT}{name}": tensor for name, tensor in text.tensors.items()}
    unused = tuple(_unused_layers(shape))
    images = {name: t for name, t in parts[_IMAGES].items() if not name.startswith(unused)}
    found = import_encoder(encoder_on_meta(shape.images), shape.images, images)
    out |= {f"{_OUR_IMAGES}{name}": tensor for name, tensor in found.items()}
    left = parts[""]
    for ours, theirs in _projector_names(shape).items():
        if theirs not in left:
            raise CheckpointError(
                f"the weights have no {theirs}, which a {shape.family.architecture} needs"
            )
        tensor = left.pop(theirs)
        out[ours] = reshaped(tensor, (1, *tensor.shape)) if ours == _NEWLINE else tensor
    if left:
        raise CheckpointError(f"{next(iter(left))} has no place in a {shape.family.architecture}")
    return {name: replace(tensor, name=name) for name, tensor in out.items()}


def _unused_layers(shape: VisionLanguageShape) -> Iterator[str]:
    """Yield the prefixes of the encoder's layers whose output nothing reads."""
    first = layers_of(shape.images).num_layers
    for number in range(first, first + shape.num_unused_layers):
        yield family_of(shape.images).layer_prefix.format(number)


def _projector_names(shape: VisionLanguageShape) -> dict[str, str]:
    """Return our name -> theirs of each tensor of the projector, and of the newline."""
    newline = {_NEWLINE: "image_newline"} if shape.family.has_newline else {}
    return newline | {
        f"{ours}.{kind}": f"{theirs}.{kind}"
        for ours, theirs in shape.family.projector.items()
        for kind in ("weight", "bias")
    }


def export_tensors(
    shape: VisionLanguageShape, tensors: Mapping[str, LazyTensor]
) -> list[LazyTensor]:
    """Return their tensors, as released folders name them; the reverse of `import_tensors`.

    Tensors of layers whose output nothing reads are zero.  Raises CheckpointError unless
    ``tensors`` are those of ``shape``.
    """
    text, images = (
        {name.removeprefix(start): t for name, t in tensors.items() if name.startswith(start)}
        for start in (_OUR_TEXT, _OUR_IMAGES)
    )
    out = [
        replace(tensor, name=shape.family.text_prefix + tensor.name)
        for tensor in hf.export_model(shape.text, text, shape.text_family)
    ]
    found = export_encoder(encoder_on_meta(shape.images), shape.images, images)
    found += list(_blank(shape, found))
    out += [replace(tensor, name=shape.family.images_prefix + tensor.name) for tensor in found]
    names = _projector_names(shape)
    rest = {name for name in tensors if not name.startswith((_OUR_TEXT, _OUR_IMAGES))}
    if left := rest ^ names.keys():
        raise CheckpointError(
            f"the checkpoint does not hold a {shape.family.architecture}: {', '.join(sorted(left))}"
        )
    for ours, theirs in names.items():
        tensor = replace(tensors[ours], name=theirs)
        out.append(reshaped(tensor, tensor.shape[1:]) if ours == _NEWLINE else tensor)
    return out


def with_attention_bias(config: Config, tensors: Mapping[str, LazyTensor]) -> JsonObject:
    """Return config.json; its encoder has biases of QKV if training has made ours other than zero.

    Our encoders always have them.
    """
    images = dict(config["vision_config"])
    if images.get("attention_bias") is False:
        images["attention_bias"] = any(
            name.startswith(_OUR_IMAGES) and name.endswith("linear_qkv.bias") and t.make().any()
            for name, t in tensors.items()
        )
    return {**config, "vision_config": images}


def _blank(shape: VisionLanguageShape, found: list[LazyTensor]) -> Iterator[LazyTensor]:
    """Yield zeros for the tensors that nothing reads."""
    family = family_of(shape.images)
    first = family.layer_prefix.format(0)
    sizes: dict[str, Sequence[int]] = {}
    for layer in _unused_layers(shape):
        sizes |= {
            layer + tensor.name.removeprefix(first): tensor.shape
            for tensor in found
            if tensor.name.startswith(first)
        }
    shapes = {tensor.name: tensor.shape for tensor in found}
    sizes |= {name: shapes[like] for name, like in family.unread.items()}
    if family.subtype == "siglip_without_norm":
        has_head = shape.images.get("vision_use_head", True)
        dims = {"h": shape.images["hidden_size"], "f": shape.images["intermediate_size"], "1": 1}
        dims["3h"] = 3 * dims["h"]
        for name, letters in _UNREAD_OF_SIGLIP.items():
            if has_head or not name.startswith("head."):
                sizes[name] = [dims[letter] for letter in letters.split()]
    for name, size in sizes.items():
        yield zeros(name, size, found[0].dtype)

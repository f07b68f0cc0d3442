"""Families of vision-language models: config.json from and to flags, and tensors part by part.

The language model is described by its own family and the encoder by that of `vision`; a family of
this file describes the projector between the two.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace

from torch import Tensor

from megatron.core.config.errors import CheckpointError
from megatron.core.config.value_types import JsonObject
from megatron.core.datasets.images import LLAVA_NEXT_GRIDS
from megatron.core.dist_checkpointing.safetensors_file import LazyTensor
from megatron.core.models.common.vision_module.vision_module import VisionModule
from megatron.core.models.multimodal.llava_model import LLaVAModel
from megatron.core.params.param_info import info_of
from megatron.training.config.run import RunConfig
from megatron.training.conversion import hf
from megatron.training.conversion.family import (
    Config,
    Family,
    Field,
    Names,
    Values,
    demand,
    named_rule,
    read_whole,
    same,
)
from megatron.training.conversion.lazy import reshaped, zeros
from megatron.training.conversion.shape import ModelShape, args_of, shape_of
from megatron.training.conversion.source import default_args, image_token, run_config
from megatron.training.conversion.tensors import Rule
from megatron.training.conversion.verify import model_on_meta
from megatron.training.conversion.vision import (
    ENCODERS,
    GEMMA3_TOWER,
    SIGLIP,
    EncoderFamily,
    export_encoder,
    import_encoder,
)
from megatron.training.models.encoders import encoder_config

# Entries of the text that folders omit if the class of `transformers` has this default.
_LLAMA: Config = {
    **{"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32},
    **{"num_attention_heads": 32, "max_position_embeddings": 2048, "vocab_size": 32000},
}
_DEFAULTS: Mapping[str, Config] = {
    "llama": _LLAMA,
    "mistral": {**_LLAMA, "intermediate_size": 14336, "num_key_value_heads": 8},
    "gemma3_text": {
        **{"hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26},
        **{"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262208},
        "max_position_embeddings": 131072,
    },
}


@dataclass(frozen=True, kw_only=True)
class VisionLanguageFamily:
    """Names and defaults of one family; ``projector``: our modules -> theirs.

    ``fields``: conversions of config.json, without its parts, to flags and back.  ``encoder``: the
    only one that the family has, of which all layers are read; None: that of vision_config.
    """

    model_type: str
    architecture: str
    projector: Names
    text: str  # model_type of the language model, if config.json has none
    images: str  # model_type of the encoder, if config.json has none, a key of `ENCODERS`
    image_token: str = "image_token_index"  # noqa: S105  its entry in config.json
    feature_layer: int = -2
    is_tied: bool = False
    fields: tuple[Field, ...] = ()
    encoder: EncoderFamily | None = None
    text_prefix: str = "language_model."  # of names in released folders, as the next
    images_prefix: str = "vision_tower."


def _read_strategy(config: Config) -> Values:
    strategy = config.get("vision_feature_select_strategy", "default")
    if strategy not in ("default", "full"):
        raise CheckpointError(
            f"config.json has vision_feature_select_strategy {strategy}: only default and full can "
            "be converted"
        )
    return {"disable_vision_class_token": strategy == "default"}


def _fields(*, merges_neighbours: bool = False) -> tuple[Field, ...]:
    """Return the fields of LLaVA; ``merges_neighbours``: a projector reads 2 x 2 patches as one."""
    fixed = {
        "vision_projection_type": "mlp",
        "pixel_shuffle": merges_neighbours,
        "image_grid_pinpoints": (),
    }
    return (
        Field(lambda config: fixed, lambda flags: {"vision_feature_layer": -1}),
        Field(
            _read_strategy,
            lambda flags: {
                "vision_feature_select_strategy": (
                    "default" if flags.disable_vision_class_token else "full"
                )
            },
        ),
        demand(projector_hidden_act="gelu", multimodal_projector_bias=True),
    )


# Tiles of an image are arranged in rows (see `TileArrangement`).
_GRIDS = Field(
    lambda config: {
        "image_grid_pinpoints": tuple(
            side for pair in config.get("image_grid_pinpoints", LLAVA_NEXT_GRIDS) for side in pair
        )
    },
    lambda flags: {"image_grid_pinpoints": list(map(list, flags.grids))},
)

_PROJECTOR = {
    f"vision_projection.encoder.linear_fc{n}": f"multi_modal_projector.linear_{n}" for n in (1, 2)
}
LLAVA = VisionLanguageFamily(
    model_type="llava",
    architecture="LlavaForConditionalGeneration",
    projector=_PROJECTOR,
    text="llama",
    images="clip_vision_model",
    fields=_fields(),
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
    fields=(*_fields(merges_neighbours=True), demand(downsample_ratio=0.5)),
)
LLAVA_NEXT = replace(
    LLAVA,
    model_type="llava_next",
    architecture="LlavaNextForConditionalGeneration",
    fields=(*LLAVA.fields, _GRIDS),
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
    encoder=ENCODERS["qwen2_vl_vision"],
    image_token="image_token_id",  # noqa: S106
    text_prefix="",
    images_prefix="visual.",
)
# Patches are averaged, normed, and projected by one matrix; each image is read in both directions.
GEMMA3 = VisionLanguageFamily(
    model_type="gemma3",
    architecture="Gemma3ForConditionalGeneration",
    projector={
        "vision_projection.norm": "multi_modal_projector.mm_soft_emb_norm",
        "vision_projection.encoder.weight": Rule(
            ("multi_modal_projector.mm_input_projection_weight",), transposed=True
        ),
    },
    text="gemma3_text",
    images="siglip_vision_model",
    encoder=GEMMA3_TOWER,
    is_tied=True,
    fields=(
        same("mm_tokens_per_image", "pooled_image_embeddings", 256),
        Field(lambda config: {"vision_projection_type": "affine"}),
    ),
    images_prefix="vision_tower.vision_model.",
)
_MERGER = {f"linear_fc{n}": f"model.visual.merger.linear_fc{n}" for n in (1, 2)}
_ADDED = {
    f"deepstack.{number}.{ours}": f"model.visual.deepstack_merger_list.{number}.{theirs}"
    for number in range(16)
    for ours, theirs in {
        **{"norm": "norm", "encoder.linear_fc1": "linear_fc1", "encoder.linear_fc2": "linear_fc2"}
    }.items()
}
# Features of some layers of the encoder are added after the first layers of the language model.
QWEN3_VL = replace(
    QWEN2_VL,
    model_type="qwen3_vl",
    architecture="Qwen3VLForConditionalGeneration",
    projector={
        **{f"vision_projection.encoder.{ours}": theirs for ours, theirs in _MERGER.items()},
        **_ADDED,
    },
    text="qwen3_vl_text",
    images="qwen3_vl_vision",
    encoder=ENCODERS["qwen3_vl_vision"],
    text_prefix="model.language_model.",
    images_prefix="model.visual.",
)
QWEN3_5 = replace(
    QWEN3_VL,
    model_type="qwen3_5",
    architecture="Qwen3_5ForConditionalGeneration",
    text="qwen3_5_vl_text",
    images="qwen3_5_vision",
    encoder=ENCODERS["qwen3_5_vision"],
)


def _read_row_ends(config: Config) -> Values:
    if config.get("image_token_index", 10) != 10:
        raise CheckpointError(
            f"config.json has image_token_index {config['image_token_index']}: only 10 can be "
            "converted, with 12 and 13 at the end of rows, as in Mistral's Tekken tokenizers"
        )
    return {"image_row_end_tokens": (12, 13)}


# A matrix merges 2 x 2 patches; tokens of text end the rows of an image.
MISTRAL3 = VisionLanguageFamily(
    model_type="mistral3",
    architecture="Mistral3ForConditionalGeneration",
    projector={
        **_PROJECTOR,
        "vision_projection.norm": "multi_modal_projector.norm",
        "vision_projection.merger": "multi_modal_projector.patch_merger.merging_layer",
    },
    text="mistral",
    images="pixtral",
    encoder=ENCODERS["pixtral"],
    is_tied=True,
    fields=(
        Field(_read_row_ends),
        demand(vision_feature_layer=-1, spatial_merge_size=2, projector_hidden_act="gelu"),
        demand(multimodal_projector_bias=False),
    ),
)
_ALL = (LLAVA, LLAVA_NEXT, INTERNVL, QWEN2_VL, GEMMA3, QWEN3_VL, QWEN3_5, MISTRAL3)
FAMILIES = {family.model_type: family for family in _ALL}
_OF_QWEN = (QWEN2_VL, QWEN3_VL, QWEN3_5)  # whose language models are no families on their own


@dataclass(frozen=True, kw_only=True)
class VisionLanguageShape:
    """What a config.json of a vision-language model describes.

    ``text_config`` and ``images``: config.json of the language model and of the encoder.
    ``flags``: dest -> value of the flags about images.  The last ``num_unused_layers`` layers of
    the encoder, whose output nothing reads, are not counted.
    """

    family: VisionLanguageFamily
    text_family: Family
    text_config: Config
    text: ModelShape
    encoder: EncoderFamily
    images: Config
    flags: Values
    num_unused_layers: int
    image_token: int  # id of the token that stands for an embedding of an image


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
    return read_whole(family.architecture, lambda: _shape_of(family, config))


def _shape_of(family: VisionLanguageFamily, config: Config) -> VisionLanguageShape:
    images = _part(config, "vision_config")
    if family in _OF_QWEN:  # folders of Qwen2-VL hold the entries of the text in config.json itself
        whole = {name: value for name, value in config.items() if name != "vision_config"}
        text = {**config.get("text_config", whole), "model_type": family.text}
    else:
        text = {"model_type": family.text, **_part(config, "text_config")}
        text = {**_DEFAULTS.get(text["model_type"], {}), **text}
    encoder = family.encoder or _encoder_named(images.get("model_type", family.images), family)
    flags = dict(encoder.flags(images))
    num_layers = flags["vision_num_layers"]
    for each in family.fields:
        flags |= each.read(config)
    if flags.get("disable_vision_class_token") and encoder is SIGLIP:
        raise CheckpointError(
            "config.json has vision_feature_select_strategy default, which drops a class token, "
            "and the encoder (siglip_vision_model) has none: only full can be converted"
        )
    if family.encoder is None:
        flags["vision_num_layers"] = _num_used_layers(config, family, num_layers)
    tied = config.get("tie_word_embeddings", family.is_tied) or text.get("tie_word_embeddings")
    text["tie_word_embeddings"] = bool(tied)
    text_family = hf.family_of(text)
    return VisionLanguageShape(
        family=family,
        text_family=text_family,
        text_config=text,
        text=text_family.shape(text),
        encoder=encoder,
        images=images,
        flags=flags,
        num_unused_layers=num_layers - flags["vision_num_layers"],
        image_token=config[family.image_token],
    )


def _part(config: Config, name: str) -> Config:
    part = config.get(name)
    if not isinstance(part, dict):
        raise CheckpointError(f"config.json has no {name}")
    return part


def _encoder_named(name: str, family: VisionLanguageFamily) -> EncoderFamily:
    """Return the encoder with model_type ``name`` in vision_config."""
    of_own = [each.images for each in _ALL if each.encoder]
    known = [each for each in ENCODERS if each not in of_own or each == GEMMA3.images]
    if family is INTERNVL:  # it reads features behind SigLIP's last norm
        known.remove("siglip_vision_model")
    if name not in known:
        raise CheckpointError(
            f"vision_config has model_type {name}: within {family.architecture}, only "
            f"{', '.join(known)} can be converted"
        )
    return ENCODERS[name]


def _num_used_layers(config: Config, family: VisionLanguageFamily, num_layers: int) -> int:
    """Return how many encoder layers run before the projector (vision_feature_layer)."""
    layer = config.get("vision_feature_layer", family.feature_layer)
    if not isinstance(layer, int) or not -num_layers <= layer <= num_layers or layer == 0:
        raise CheckpointError(
            f"config.json has vision_feature_layer {layer}: only one layer of {num_layers} can be "
            "converted, -1 for the last"
        )
    return layer if layer > 0 else num_layers + 1 + layer


def flags_of(shape: VisionLanguageShape) -> dict[str, object]:
    """Return the flags, dest -> value, that build the model."""
    return {**args_of(shape.text), "model_kind": "vlm", **shape.flags}


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
    layers = encoder_config(run)
    heads = layers.num_attention_heads
    if (layers.num_query_groups, layers.kv_channels) != (heads, layers.hidden_size // heads):
        raise CheckpointError(
            f"the encoder has {heads} heads of {layers.kv_channels} channels and "
            f"{layers.num_query_groups} query groups, as the language model: no Hugging Face "
            "family has such an encoder; train with --vision-num-attention-heads"
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
    layers = encoder_config(run)
    sizes = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads")
    own = {f"vision_{name}": getattr(layers, name) for name in sizes}
    flags = SimpleNamespace(**{**vars(run.vision), "grids": run.vision.grids, **own})
    text = _text_of(run, vocab_size)
    kind = run.vision.vision_model_type
    fitting = [f for f in _ALL if f.encoder and f.encoder.subtype == kind]
    if text.linear_layers and QWEN3_5 in fitting:
        fitting = [QWEN3_5]
    of_own = fitting[0] if fitting else None
    name = next((n for n, e in ENCODERS.items() if kind.startswith(e.subtype)), LLAVA.images)
    family = of_own or {INTERNVL.images: INTERNVL}.get(name, LLAVA)
    name = family.images if of_own else name
    encoder = family.encoder or ENCODERS[name]
    if flags.grids:
        family = LLAVA_NEXT
    if family in _OF_QWEN:
        text_family = hf.family_of({"model_type": family.text})
    else:
        text_family = hf.choose_family(text, None, family.text)
    images: JsonObject = {"model_type": name}
    whole: JsonObject = {}
    for each in encoder.fields:
        images |= each.write(flags)
    for each in family.fields:
        whole |= each.write(flags)
    if family in _OF_QWEN:  # what the projector returns
        name = "hidden_size" if family is QWEN2_VL else "out_hidden_size"
        images[name] = text.hidden_size
    of_text = {**text_family.config(text), "architectures": None}
    if family is QWEN3_5:
        of_text["model_type"] = "qwen3_5_text"
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        family.image_token: image_token(run),
        "tie_word_embeddings": text.is_tied,
        "text_config": of_text,
        "vision_config": images,
        **whole,
    }


_TEXT = "language_model."
_IMAGES = "vision_tower."
_NEWLINE = "image_newline.weight"
_MATRIX_OF_BLOCKS = "vision_projection.merger.weight"
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
        for part in ("patch_embed", "pos_embed", "blocks", "merger.ln_q", "merger.norm")
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
        if shape.family is QWEN3_5 and name.startswith("mtp."):  # transformers drops them too
            continue
        for old, new in _SPELLINGS:
            if name.startswith(old):
                name = new + name.removeprefix(old)
        prefix = next(each for each in parts if name.startswith(each))
        parts[prefix][name.removeprefix(prefix)] = tensor
    text = hf.import_model(shape.text_config, parts[_TEXT])
    out = {f"{_OUR_TEXT}{name}": tensor for name, tensor in text.tensors.items()}
    unused = tuple(_unused_layers(shape))
    images = {name: t for name, t in parts[_IMAGES].items() if not name.startswith(unused)}
    model = _model_of(shape)
    found = import_encoder(shape.encoder, _encoder_of(model), shape.images, images)
    out |= {f"{_OUR_IMAGES}{name}": tensor for name, tensor in found.items()}
    left = parts[""]
    for ours, (rule, size) in _projector_rules(shape, model).items():
        theirs = rule.theirs[0].removeprefix("model.")
        if theirs not in left:
            raise CheckpointError(
                f"the weights have no {theirs}, which a {shape.family.architecture} needs"
            )
        tensor = left.pop(theirs)
        tensor = reshaped(tensor, size) if ours == _NEWLINE else tensor
        out[ours] = rule.join(ours, [tensor], model.config, size)
        if ours == _MATRIX_OF_BLOCKS:
            out[ours] = replace(out[ours], make=partial(_swap_columns, out[ours], 4, -1))
    if left:
        raise CheckpointError(f"{next(iter(left))} has no place in a {shape.family.architecture}")
    return {name: replace(tensor, name=name) for name, tensor in out.items()}


def _model_of(shape: VisionLanguageShape) -> LLaVAModel:
    """Return the model without weights; the number of tokens makes no difference to images."""
    tokens = {"tokenizer_type": "NullTokenizer", "vocab_size": 1}
    model = model_on_meta(run_config(default_args() | flags_of(shape) | tokens), 1)
    assert isinstance(model, LLaVAModel), "all families are"
    return model


def _encoder_of(model: LLaVAModel) -> VisionModule:
    assert model.vision_model is not None, "the only stage has it"
    return model.vision_model


def _unused_layers(shape: VisionLanguageShape) -> Iterator[str]:
    """Yield the prefixes of the encoder's layers whose output nothing reads."""
    first = shape.flags["vision_num_layers"]
    for number in range(first, first + shape.num_unused_layers):
        yield shape.encoder.layer_prefix.format(number)


def _projector_rules(
    shape: VisionLanguageShape, model: LLaVAModel
) -> dict[str, tuple[Rule, tuple[int, ...]]]:
    """Return the rule and the size of each of our tensors between encoder and language model."""
    names = {**shape.family.projector, _NEWLINE: "image_newline"}
    found = {}
    for name, param in model.named_parameters():
        if not name.startswith((_OUR_TEXT, _OUR_IMAGES)):
            rule = named_rule(names, name)
            assert rule is not None, f"{name} has no counterpart in a {shape.family.architecture}"
            found[name] = rule, tuple(info_of(param).global_shape)
    return found


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
        replace(tensor, name=_released(shape.family, tensor.name))
        for tensor in hf.export_model(shape.text, text, shape.text_family)
    ]
    model = _model_of(shape)
    found = export_encoder(shape.encoder, _encoder_of(model).config, shape.images, images)
    found += list(_blank(shape, found))
    out += [replace(tensor, name=shape.family.images_prefix + tensor.name) for tensor in found]
    rules = _projector_rules(shape, model)
    rest = {name for name in tensors if not name.startswith((_OUR_TEXT, _OUR_IMAGES))}
    if left := rest ^ rules.keys():
        raise CheckpointError(
            f"the checkpoint does not hold a {shape.family.architecture}: {', '.join(sorted(left))}"
        )
    for ours, (rule, _) in rules.items():
        own = tensors[ours]
        if ours == _MATRIX_OF_BLOCKS:
            own = replace(own, make=partial(_swap_columns, own, -1, 4))
        (tensor,) = rule.split(own, model.config)
        out.append(reshaped(tensor, tensor.shape[1:]) if ours == _NEWLINE else tensor)
    return out


def _released(family: VisionLanguageFamily, name: str) -> str:
    """Return the name in released folders of a tensor of the language model."""
    if family.text_prefix.startswith("model."):  # its output layer is outside
        return re.sub(r"^model\.", family.text_prefix, name)
    return family.text_prefix + name


def _swap_columns(tensor: LazyTensor, first: int, second: int) -> Tensor:
    """Return a matrix whose columns are by patch and channel in the order of channel and patch.

    For 4 patches of a block: -1, 4 is this way, 4, -1 the way back.
    """
    columns: Tensor = tensor.make().unflatten(1, (second, first))
    return columns.transpose(1, 2).flatten(1)


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
    first = shape.encoder.layer_prefix.format(0)
    sizes: dict[str, Sequence[int]] = {}
    for layer in _unused_layers(shape):
        sizes |= {
            layer + tensor.name.removeprefix(first): tensor.shape
            for tensor in found
            if tensor.name.startswith(first)
        }
    shapes = {tensor.name: tensor.shape for tensor in found}
    sizes |= {name: shapes[like] for name, like in shape.encoder.unread.items()}
    if shape.encoder is SIGLIP:
        has_head = shape.images.get("vision_use_head", True)
        width, ffn = (shape.flags[f"vision_{name}"] for name in ("hidden_size", "ffn_hidden_size"))
        dims = {"h": width, "f": ffn, "1": 1}
        dims["3h"] = 3 * dims["h"]
        for name, letters in _UNREAD_OF_SIGLIP.items():
            if has_head or not name.startswith("head."):
                sizes[name] = [dims[letter] for letter in letters.split()]
    for name, size in sizes.items():
        yield zeros(name, size, found[0].dtype)

"""Tensors of vision-language models from Hugging Face and back, part by part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from megatron.core.config.errors import CheckpointError
from megatron.core.config.value_types import JsonObject
from megatron.core.dist_checkpointing.safetensors_file import LazyTensor
from megatron.training.conversion import hf
from megatron.training.conversion.family import Config
from megatron.training.conversion.verify import groups_of_one_rank
from megatron.training.conversion.vision import build_encoder, export_encoder, import_encoder
from megatron.training.conversion.vision_language import VisionLanguageShape, encoder_layers
from megatron.training.conversion.vision_qwen import export_qwen, import_qwen

_TEXT = "language_model."
_IMAGES = "vision_tower."
_NEWLINE = "image_newline.weight"
_QWEN_IMAGES = "visual."
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
    ("model.", ""),
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
    if shape.family.reads_any_size:
        return _import_qwen(shape, weights)
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


def _import_qwen(
    shape: VisionLanguageShape, weights: Mapping[str, LazyTensor]
) -> dict[str, LazyTensor]:
    text: dict[str, LazyTensor] = {}
    images: dict[str, LazyTensor] = {}
    for name, tensor in weights.items():
        short = name.removeprefix("model.")
        if short.startswith(_QWEN_IMAGES):
            images[short.removeprefix(_QWEN_IMAGES)] = tensor
        else:
            text[name.replace("model.language_model.", "model.")] = tensor
    found = hf.import_model(shape.text_config, text).tensors
    out = {f"{_OUR_TEXT}{name}": replace(t, name=f"{_OUR_TEXT}{name}") for name, t in found.items()}
    return out | import_qwen(encoder_layers(shape), images)


def _export_qwen(shape: VisionLanguageShape, tensors: Mapping[str, LazyTensor]) -> list[LazyTensor]:
    text = {n: t for n, t in tensors.items() if n.startswith(_OUR_TEXT)}
    rest = {n: t for n, t in tensors.items() if n not in text}
    out = hf.export_model(shape.text, _without_prefix(text, _OUR_TEXT), shape.text_family)
    found = export_qwen(encoder_layers(shape), shape.images, rest)
    return [*out, *(replace(tensor, name=_QWEN_IMAGES + tensor.name) for tensor in found)]


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
        tensor = left.pop(theirs)
        yield ours, _with_shape(tensor, (1, *tensor.shape)) if ours == _NEWLINE else tensor


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
    if shape.family.reads_any_size:
        return _export_qwen(shape, tensors)
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
    for ours, theirs in names.items():
        tensor = replace(tensors[ours], name=theirs)
        out.append(_with_shape(tensor, tensor.shape[1:]) if ours == _NEWLINE else tensor)
    return out


def _with_shape(tensor: LazyTensor, shape: tuple[int, ...]) -> LazyTensor:
    return replace(tensor, shape=shape, make=lambda: tensor.make().reshape(shape))


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
    if shape.encoder_family.subtype == "siglip_without_norm":
        has_head = shape.images.get("vision_use_head", True)
        sizes = {"h": shape.images["hidden_size"], "f": shape.images["intermediate_size"], "1": 1}
        sizes["3h"] = 3 * sizes["h"]
        for name, letters in _UNREAD_OF_SIGLIP.items():
            if has_head or not name.startswith("head."):
                size = tuple(sizes[letter] for letter in letters.split())
                yield name, replace(found[0], shape=size)


def _zeros(name: str, like: LazyTensor) -> LazyTensor:
    return LazyTensor(
        name, like.dtype, like.shape, partial(torch.zeros, like.shape, dtype=like.dtype)
    )

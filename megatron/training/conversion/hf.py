"""Convert tensors of Hugging Face folders to ours and back.

Tensors are `LazyTensor`s, computed when they are written.  Only those that must be zero or equal to
another tensor are read at once, to check this.

A reward model is a language model with one score in place of the output layer; Hugging Face calls
it a sequence classifier of one label.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron.core.config.errors import CheckpointError
from megatron.core.config.value_types import JsonObject
from megatron.core.dist_checkpointing.key_names import is_vocabulary
from megatron.core.dist_checkpointing.safetensors_file import LazyTensor
from megatron.core.dist_checkpointing.validation import INSIDE_QUANTIZER
from megatron.training.conversion.families import FAMILIES, PARTS
from megatron.training.conversion.family import Config, Family, Field, Values
from megatron.training.conversion.lazy import (
    first_rows,
    stacked,
    unstacked,
    zeros,
)
from megatron.training.conversion.quantized import plain_numbers
from megatron.training.conversion.shape import ModelShape
from megatron.training.conversion.tensors import output_of, tensors_of
from megatron.training.models.registry import model_kind

SCORE = "score.weight"  # here and at Hugging Face
CLASSIFIER = "ForSequenceClassification"
_LANGUAGE_MODEL = "ForCausalLM"
_LABELS: Values = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}


def is_reward_model(config: Config) -> bool:
    """Return whether config.json names a sequence classifier."""
    architectures = config.get("architectures")
    return isinstance(architectures, list) and str(architectures[:1]).endswith(f"{CLASSIFIER}']")


def scoring(family: Family) -> Family:
    """Return the family of the reward models of ``family``.

    Raises CheckpointError if that is no family of left-to-right language models.
    """
    if not family.architecture.endswith(_LANGUAGE_MODEL) or family.kind != "gpt":
        raise CheckpointError(f"{family.model_type}: its sequence classifiers are not converted")
    return replace(
        family,
        architecture=family.architecture.replace(_LANGUAGE_MODEL, CLASSIFIER),
        fields=(*family.fields, Field(_check_labels, lambda shape: _LABELS)),
        outside={**family.outside, "score": "score"},
        always={**family.always, "is_reward": True},
    )


def without_heads(weights: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Return the weights that the adapters of a reward model leave frozen.

    They train the score; a reward model has no output layer over the vocabulary.
    """
    return {name: t for name, t in weights.items() if name not in (SCORE, "output_layer.weight")}


def as_classifier(config: Config) -> JsonObject:
    """Return the config.json of a language model as that of its reward model."""
    if is_reward_model(config) or not config:
        return dict(config)
    names = [name.replace(_LANGUAGE_MODEL, CLASSIFIER) for name in config.get("architectures", ())]
    return {**config, "architectures": names, **_LABELS}


def _check_labels(config: Config) -> Values:
    """Raise CheckpointError unless the classifier has one label."""
    number = len(config.get("id2label", (0, 1)))
    if number != 1:
        raise CheckpointError(
            f"config.json has {number} labels: only classifiers of one label, which are reward "
            "models, can be converted"
        )
    return {}


_EMBEDDING = "embedding.word_embeddings.weight"
_MANY = 100  # counts as more differences than any two models have


@dataclass(frozen=True)
class HFModel:
    """Content of a Hugging Face folder: family, shape, and tensors by our names."""

    family: Family
    shape: ModelShape
    tensors: Mapping[str, LazyTensor]
    fresh: tuple[str, ...] = ()  # names of tensors that the folder lacks


def family_of(config: Config) -> Family:
    """Return the family of config.json's ``model_type``.  Raises CheckpointError if unknown."""
    kind = config.get("model_type")
    known = {**FAMILIES, **PARTS}
    if kind not in known:
        raise CheckpointError(
            f"config.json has model_type {kind}: the families here are {', '.join(FAMILIES)}"
        )
    family = known[str(kind)]
    return scoring(family) if is_reward_model(config) else family


def import_model(config: Config, weights: Mapping[str, LazyTensor]) -> HFModel:
    """Convert their tensors to ours.

    Raises CheckpointError unless each of their tensors is used once and each of ours is complete.
    """
    family = family_of(config)
    shape = family.shape(config)
    _check_counts(shape, weights)
    shape = _as_stored(shape, family, weights)
    left: dict[str, LazyTensor] = {}
    for name, tensor in weights.items():
        for old, new in family.spellings.items():
            name = name.replace(old, new)
        left[name] = tensor
    in_few_bits = tuple(end + kind for end in family.stacked for kind in ("_blocks", "_scales"))
    left = plain_numbers(unstacked(left, (*family.stacked, *in_few_bits)), config)
    tensors: dict[str, LazyTensor] = {}
    fresh: list[str] = []
    for name, size in tensors_of(shape).items():
        rule = family.rule(name, shape)
        if name.startswith(family.heads) and not any(_find(left, t) for t in rule.theirs):
            fresh.append(name)
            tensors[name] = _fresh(name, size, next(iter(weights.values())).dtype)
            continue
        parts = [_take(left, theirs, family) for theirs in rule.theirs]
        tensors[name] = rule.join(name, parts, shape, size)
    for again, ours in _copies(shape, family).items():
        copy = left.pop(again, None)
        if copy is not None and not torch.equal(copy.make(), tensors[ours].make()):
            original = family.name_of(ours, shape)
            raise CheckpointError(f"{again} differs from {original}, which it should repeat")
    for name in family.blank(shape):
        if _take(left, name, family).make().any():
            raise CheckpointError(
                f"{name} is not zero: a {family.architecture} with this config.json has no place"
            )
    unused = [name for name in left if not name.endswith(family.no_weights)]
    if unused:
        raise CheckpointError(
            f"{len(unused)} tensors have no place in a {family.architecture} with this "
            f"config.json: {', '.join(unused[:3])}"
        )
    return HFModel(family, shape, tensors, tuple(fresh))


def _check_counts(shape: ModelShape, weights: Mapping[str, LazyTensor]) -> None:
    """Raise CheckpointError if config.json has more layers or experts than the weights can hold.

    This runs before the names of all tensors are listed, which takes too long for a huge count.
    """
    rows = max((tensor.shape[0] for tensor in weights.values() if tensor.shape), default=0)
    for what, count, most in (
        ("layers", shape.num_layers, len(weights)),
        ("decoder layers", shape.decoder_num_layers or 0, len(weights)),
        ("layers that predict ahead", shape.mtp_num_layers or 0, max(len(weights), 1)),
        ("experts", shape.num_experts or 0, max(len(weights), rows)),
    ):
        if count > most:
            raise CheckpointError(
                f"config.json asks for {count} {what}, and the weights are {len(weights)} tensors: "
                "a file is missing, or config.json is of another model"
            )


def _fresh(name: str, size: tuple[int, ...], dtype: torch.dtype) -> LazyTensor:
    """Initialize a tensor of a head that the checkpoint lacks; its name determines the values."""

    def make() -> Tensor:
        if len(size) == 1:
            return torch.full(size, float(name.endswith("norm.weight")), dtype=dtype)
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        return torch.normal(0.0, 0.02, size, generator=generator).to(dtype)

    return LazyTensor(name, dtype, size, make)


def _find(left: Mapping[str, LazyTensor], name: str) -> str | None:
    """Return ``name`` as the file spells it, or None.  Some files omit the model's prefix."""
    return next((s for s in (name, name.partition(".")[2]) if s in left), None)


def _take(left: dict[str, LazyTensor], name: str, family: Family) -> LazyTensor:
    """Remove a tensor from ``left`` and return it.  Raises CheckpointError if it is missing."""
    if (spelling := _find(left, name)) is not None:
        return left.pop(spelling)
    raise CheckpointError(f"the weights have no {name}, which a {family.architecture} needs")


def _as_stored(shape: ModelShape, family: Family, weights: Mapping[str, LazyTensor]) -> ModelShape:
    """Correct ``shape`` where config.json differs from the weights.

    MTP layers without weights are removed.  A model with an encoder is tied if its output layer is
    missing or equals the embedding.
    """
    first = family.prefix_of_depth(0, shape)
    if shape.mtp_num_layers and not any(name.startswith(first) for name in weights):
        return replace(shape, mtp_num_layers=None)
    if model_kind(shape.kind).has_encoder:
        names = (output_of(shape), _EMBEDDING)
        output, embedding = (weights.get(family.name_of(name, shape)) for name in names)
        is_own = output and embedding and not torch.equal(output.make(), embedding.make())
        return replace(shape, is_tied=not is_own)
    return shape


def _copies(shape: ModelShape, family: Family) -> dict[str, str]:
    """Return their names of tensors that repeat another tensor -> our names of the latter."""
    out = dict(family.repeats)
    if shape.is_tied:
        out[family.name_of(output_of(shape), shape)] = _EMBEDDING
    return out | _copies_ahead(shape, family)


def _copies_ahead(shape: ModelShape, family: Family) -> dict[str, str]:
    """Return `_copies` of the MTP layers alone, which an export always writes."""
    output = output_of(shape)
    return {
        family.prefix_of_depth(depth, shape) + theirs: (
            _EMBEDDING if shape.is_tied and ours == output else ours
        )
        for depth in range(shape.mtp_num_layers or 0)
        for ours, theirs in family.copies.items()
    }


def export_model(
    shape: ModelShape, tensors: Mapping[str, LazyTensor], family: Family
) -> list[LazyTensor]:
    """Convert our tensors to theirs, in our order, without vocabulary padding.

    Raises CheckpointError unless ``tensors`` are those of ``shape``.
    """
    sizes = tensors_of(shape)
    tensors = {name: t for name, t in tensors.items() if INSIDE_QUANTIZER not in name}
    if sizes.keys() != tensors.keys():
        names = sorted(sizes.keys() ^ tensors.keys())
        raise CheckpointError(
            f"the checkpoint does not hold the model that its command line describes: "
            f"{', '.join(names[:3])}"
        )
    out: list[LazyTensor] = []
    for name, size in sizes.items():
        ours = first_rows(tensors[name], size[0]) if is_vocabulary(name) else tensors[name]
        if ours.shape != size:
            raise CheckpointError(f"{name} has shape {list(ours.shape)}, not {list(size)}")
        out += family.rule(name, shape).split(ours, shape)
    for name, ours_name in _copies_ahead(shape, family).items():
        out.append(replace(first_rows(tensors[ours_name], shape.vocab_size), name=name))
    out += [zeros(name, size, out[0].dtype) for name, size in family.blank(shape).items()]
    return stacked(out, family.stacked)


def choose_family(shape: ModelShape, wanted: str | None, first: str | None = None) -> Family:
    """Return a family whose config.json can describe ``shape``.

    Only ``wanted`` is tried if it is given, else all families of the model kind, ``first`` before
    the others.  Raises CheckpointError with what the nearest family lacks.
    """
    alike = [name for name, family in FAMILIES.items() if family.kind == shape.kind]
    if not alike:
        kinds = ", ".join(dict.fromkeys(family.kind for family in FAMILIES.values()))
        raise CheckpointError(
            f"--format hf converts models of kind {kinds}, and this one is of kind {shape.kind}: "
            "use another --format"
        )
    if wanted is not None and wanted not in alike:
        raise CheckpointError(
            f"--family {wanted}: the families of a {shape.kind} are {', '.join(alike)}"
        )
    names = [wanted] if wanted else sorted(alike, key=lambda name: name != first)
    refused: list[tuple[int, str]] = []
    for family in map(FAMILIES.__getitem__, names):
        try:
            family = scoring(family) if shape.is_reward else family
            lacks = list(shape.differences(family.shape(family.config(shape))))
        except CheckpointError as error:  # its config.json would not be supported
            refused.append((_MANY, f"{family.architecture}: {error}"))
            continue
        if not lacks:
            return family
        refused.append((len(lacks), f"{family.architecture} has no {', '.join(lacks[:4])}"))
    nearest = min(refused, key=lambda each: each[0])
    raise CheckpointError(f"no Hugging Face family is this model: the nearest, {nearest[1]}")

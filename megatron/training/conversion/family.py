"""Conversion tables of one family of Hugging Face models: config.json and tensor names.

In this package "ours" are the global tensor names of this program and the values of `ModelShape`;
"theirs" are the tensor names and config.json entries of Hugging Face.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, TypeVar

from megatron.core.config.errors import CheckpointError
from megatron.core.config.value_types import JsonObject
from megatron.training.conversion.shape import ModelShape
from megatron.training.conversion.tensors import AHEAD, AHEAD_LAYER, Rule

Config: TypeAlias = Mapping[str, Any]  # config.json, or an object in it
Values: TypeAlias = Mapping[str, Any]  # value by name, of a `ModelShape` or of config.json
Names: TypeAlias = Mapping[str, str | Rule]  # our name -> theirs, of tensors or modules
T = TypeVar("T")
_IN_LAYER = re.compile(r"(encoder|decoder)\.layers\.(\d+)\.(.*)")
_IN_AHEAD = re.compile(AHEAD.replace(".", r"\.").format(r"(\d+)") + "(.*)")
_OF_EXPERT = re.compile(r"(.*\.local_experts\.)(\d+)(\..*)")


@dataclass(frozen=True)
class Field:
    """Conversion of some entries of config.json to values of `ModelShape` and back.

    Those of images are values of flags, dest -> value, and an object with them as attributes.
    """

    read: Callable[[Config], Values] = lambda config: {}
    write: Callable[[Any], Values] = lambda shape: {}


@dataclass(frozen=True, kw_only=True)
class Family:
    """Hugging Face model family: how its config.json and its tensors are converted.

    In tables of names, a name without ``.weight`` or ``.bias`` at its end stands for both, and
    ``{}`` stands for the number of an expert.

    - ``fields``: conversions of config.json; ``always``: values that all models of the family have.
    - ``outside``: our name -> theirs, of tensors outside of layers.
    - ``layer``: our name -> theirs, of tensors in a layer, both without the prefix of the layer.
      A key that begins with ``encoder.`` or ``decoder.`` is valid for that stack only.
    - ``layer_prefix``: their prefix of a layer; {} is its number, {stack} is encoder or decoder.
    - ``elsewhere``: called with our complete name of a tensor; returns their complete name or a
      rule if the position of the tensor depends on the model, else None.
    - ``ahead``: our name -> theirs, of tensors in a multi-token prediction (MTP) layer, numbered in
      theirs after the model's layers; ``copies``: our name outside -> their name in each MTP layer,
      of tensors that these layers repeat.
    - ``repeats``: their name -> ours, of tensors that some files store a second time.
    - ``spellings``: substring of names in other files -> its replacement.
    - ``stacked``: ends of names of tensors that hold all experts of a layer; the tables call the
      entry of expert 3 ``name.3``.
    - ``heads``: prefixes of our names of tensors that a checkpoint may lack.
    - ``blank``: their name -> shape, of tensors without a counterpart in ours, which must be zero.
    """

    model_type: str
    architecture: str
    fields: tuple[Field, ...]
    outside: Names
    layer: Names
    layer_prefix: str = "model.layers.{}."
    ahead: Names = field(default_factory=dict)
    copies: Mapping[str, str] = field(default_factory=dict)
    repeats: Mapping[str, str] = field(default_factory=dict)
    spellings: Mapping[str, str] = field(default_factory=dict)
    elsewhere: Callable[[str, ModelShape], str | Rule | None] = lambda name, shape: None
    stacked: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    blank: Callable[[ModelShape], Mapping[str, tuple[int, ...]]] = lambda shape: {}
    always: Values = field(default_factory=dict)
    no_weights: tuple[str, ...] = ("rotary_emb.inv_freq",)  # ends of names of buffers to skip

    @property
    def kind(self) -> str:
        """Model kind of the family: gpt, bert, t5 or mamba."""
        return str(self.always.get("kind", "gpt"))

    def shape(self, config: Config) -> ModelShape:
        """Return the model that config.json describes.  Raises CheckpointError if unsupported."""
        return read_whole(self.architecture, lambda: self._shape(config))

    def _shape(self, config: Config) -> ModelShape:
        values = dict(self.always)
        for each in self.fields:
            values |= each.read(config)
        heads = values["num_attention_heads"]
        groups = values["num_query_groups"] = values.get("num_query_groups") or heads
        if heads % groups:
            raise CheckpointError(
                f"config.json has num_attention_heads {heads}, which {groups} groups of keys and "
                "values cannot share"
            )
        values["kv_channels"] = values.get("kv_channels") or values["hidden_size"] // heads
        values.setdefault("windows", (None,) * values["num_layers"])
        values.setdefault("softmax_scale", values["kv_channels"] ** -0.5)
        if values.get("embedding_scale") == 0:
            values["embedding_scale"] = values["hidden_size"] ** 0.5
        return ModelShape(**values)

    def config(self, shape: ModelShape) -> JsonObject:
        """Return a config.json for ``shape``, without values that the family has no entry for."""
        out: JsonObject = {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "use_cache": True,
        }
        for each in self.fields:
            out |= each.write(shape)
        return out

    def prefix_of_depth(self, depth: int, shape: ModelShape) -> str:
        """Return Hugging Face's prefix of MTP layer ``depth``, which follows the model's layers."""
        return self.layer_prefix.format(shape.num_layers + depth, stack="decoder")

    def name_of(self, name: str, shape: ModelShape) -> str:
        """Return their name of a tensor that corresponds to exactly one of theirs."""
        return self.rule(name, shape).theirs[0]

    def rule(self, name: str, shape: ModelShape) -> Rule:
        """Return the rule of our tensor ``name``.  Raises CheckpointError if there is none."""
        prefix, tail, expert, stack = "", name, "", ""
        table = self.outside
        if found := _IN_LAYER.fullmatch(name):
            prefix, tail = self.layer_prefix.format(found[2], stack=found[1]), found[3]
            table, stack = self.layer, found[1]
        elif found := _IN_AHEAD.fullmatch(name):
            prefix, tail = self.prefix_of_depth(int(found[1]), shape), found[2]
            table = self.layer if tail.startswith(AHEAD_LAYER) else self.ahead
            tail = tail.removeprefix(AHEAD_LAYER)
        if found := _OF_EXPERT.fullmatch(tail):
            expert, tail = found[2], f"{found[1]}{{}}{found[3]}"
        rule = named_rule(table, f"{stack}.{tail}") or named_rule(table, tail)
        if moved := self.elsewhere(name, shape):
            prefix, rule = "", _rule_of(moved)
        if rule is None:
            raise CheckpointError(f"{name} has no counterpart in {self.architecture}")
        return replace(rule, theirs=tuple(prefix + each.format(expert) for each in rule.theirs))


def read_whole(architecture: str, read: Callable[[], T]) -> T:
    """Return what ``read`` reads of config.json.  Raises CheckpointError if it has wrong values."""
    try:
        return read()
    except KeyError as error:
        raise CheckpointError(f"config.json has no {error.args[0]}") from None
    except (TypeError, ValueError, AttributeError, ArithmeticError, IndexError) as error:
        raise CheckpointError(f"config.json does not describe a {architecture}: {error}") from None


def named_rule(table: Names, name: str) -> Rule | None:
    """Return the rule that ``table`` has for a tensor or for its module, else None.

    A name without ``.weight`` or ``.bias`` at its end stands for both.
    """
    if name in table:
        return _rule_of(table[name])
    module, _, kind = name.rpartition(".")
    if module not in table or kind not in ("weight", "bias"):
        return None
    rule = _rule_of(table[module])
    return replace(rule, theirs=tuple(f"{each}.{kind}" for each in rule.theirs))


def _rule_of(theirs: str | Rule) -> Rule:
    return Rule((theirs,)) if isinstance(theirs, str) else theirs

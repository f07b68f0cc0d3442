"""What is known of a family of Hugging Face models: its config.json and its tensors, both ways."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from megatron.core.config.errors import CheckpointError
from megatron.core.dist_checkpointing.value_types import JsonObject
from megatron.training.conversion.shape import ModelShape
from megatron.training.conversion.tensors import AHEAD, AHEAD_LAYER, Rule, tensors_of

Config: TypeAlias = Mapping[str, Any]  # config.json, or an object in it
Values: TypeAlias = Mapping[str, Any]  # of a `ModelShape`, or of config.json, by name
Names: TypeAlias = Mapping[str, str | Rule]  # ours -> theirs, of tensors or of modules
_IN_LAYER = re.compile(r"(encoder|decoder)\.layers\.(\d+)\.(.*)")
_IN_AHEAD = re.compile(AHEAD.replace(".", r"\.").format(r"(\d+)") + "(.*)")
_OF_EXPERT = re.compile(r"(.*\.local_experts\.)(\d+)(\..*)")


@dataclass(frozen=True)
class Field:
    """Some entries of config.json, and the values of `ModelShape` that they stand for."""

    read: Callable[[Config], Values] = lambda config: {}
    write: Callable[[ModelShape], Values] = lambda shape: {}


@dataclass(frozen=True, kw_only=True)
class Family:
    """``outside`` and ``layer`` name their tensors by ours, ``layer`` behind ``layer_prefix``.

    A name without ``.weight`` or ``.bias`` at its end stands for both.
    ``layer_prefix`` has {} for the number of the layer, and {stack} where there are an encoder and
    a decoder; a key of ``layer`` that begins with one of these is of it alone.  ``elsewhere``: what
    a tensor is whose place depends on the model, by its whole names, None for others.
    In names of experts ``{}`` stands for the number, in ours and in theirs.  ``ahead`` names those
    of a layer that predicts tokens further ahead, a layer of its own in theirs; ``copies`` what
    such a layer repeats, by our name outside; ``repeats``: their names of what some files hold
    once more -> ours.  ``spellings``: pieces of names in other files -> in theirs.  ``stacked``:
    ends of names of tensors that hold all experts of a layer, of which ``name.3`` is number 3's in
    the tables.  ``heads``: what names of ours begin with that a checkpoint may lack.  ``blank``:
    theirs that only zeros may be in, and their shapes, as ours has no such tensor.
    ``always`` holds for every model of the family, whatever its config.json says.
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
    no_weights: tuple[str, ...] = ("rotary_emb.inv_freq",)  # ends of names of constant buffers

    @property
    def kind(self) -> str:
        """Of its models."""
        return str(self.always.get("kind", "gpt"))

    def shape(self, config: Config) -> ModelShape:
        """The model that config.json describes.  Raises CheckpointError for what is not here."""
        try:
            return self._shape(config)
        except KeyError as error:
            raise CheckpointError(f"config.json has no {error.args[0]}") from None
        except (TypeError, ValueError, AttributeError, ArithmeticError, IndexError) as error:
            raise CheckpointError(
                f"config.json does not describe a {self.architecture}: {error}"
            ) from None

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
        """A config.json of ``shape``, as far as the family can say it."""
        out: JsonObject = {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "use_cache": True,
        }
        for each in self.fields:
            out |= each.write(shape)
        return out

    def prefix_of_depth(self, depth: int, shape: ModelShape) -> str:
        """In front of their tensors of a layer that predicts ahead; behind the model's."""
        return self.layer_prefix.format(shape.num_layers + depth, stack="decoder")

    def rules(self, shape: ModelShape) -> dict[str, Rule]:
        """Our global name -> rule, of every tensor of ``shape``.  Raises CheckpointError."""
        return {name: self.rule(name, shape) for name in tensors_of(shape)}

    def name_of(self, name: str, shape: ModelShape) -> str:
        """Their name of a tensor that is one in both."""
        return self.rule(name, shape).theirs[0]

    def rule(self, name: str, shape: ModelShape) -> Rule:
        """The rule of our tensor ``name``.  Raises CheckpointError."""
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
        rule = _named(table, f"{stack}.{tail}") or _named(table, tail)
        if moved := self.elsewhere(name, shape):
            prefix, rule = "", _rule_of(moved)
        if rule is None:
            raise CheckpointError(f"{name} has no counterpart in {self.architecture}")
        return replace(rule, theirs=tuple(prefix + each.format(expert) for each in rule.theirs))


def _named(table: Names, name: str) -> Rule | None:
    """The rule of a tensor of ours, which the table names itself or by its module."""
    if name in table:
        return _rule_of(table[name])
    module, _, kind = name.rpartition(".")
    if module not in table or kind not in ("weight", "bias"):
        return None
    rule = _rule_of(table[module])
    return replace(rule, theirs=tuple(f"{each}.{kind}" for each in rule.theirs))


def _rule_of(theirs: str | Rule) -> Rule:
    return Rule((theirs,)) if isinstance(theirs, str) else theirs

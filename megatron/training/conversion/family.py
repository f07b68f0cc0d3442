"""Conversion tables of one family of Hugging Face models, and entries that several families share.

In this package "ours" are the global tensor names of this program and the values of `ModelShape`;
"theirs" are the tensor names and config.json entries of Hugging Face.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, TypeVar

from megatron.core.config.errors import CheckpointError
from megatron.core.config.value_types import JsonObject
from megatron.core.transformer.rope import yarn_mscale
from megatron.training.conversion.shape import ModelShape
from megatron.training.conversion.tensors import Rule

Config: TypeAlias = Mapping[str, Any]  # config.json, or an object in it
Values: TypeAlias = Mapping[str, Any]  # value by name, of a `ModelShape` or of config.json
Names: TypeAlias = Mapping[str, str | Rule]  # our name -> theirs, of tensors or modules
T = TypeVar("T")
_IN_LAYER = re.compile(r"(encoder|decoder)\.layers\.(\d+)\.(.*)")
_IN_AHEAD = re.compile(
    r"mtp\.layers\.(\d+)\.(transformer_layer\.|mtp_model_layer\.layers\.(\d+)\.|)(.*)"
)
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
      theirs after the model's layers, or from 0 with the prefix ``ahead_prefix``; ``copies``: our
      name outside -> their name in each MTP layer, of tensors that these layers repeat.
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
    ahead_prefix: str | None = None
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

    def prefix_of_depth(self, depth: int, shape: ModelShape, part: int = 0) -> str:
        """Return Hugging Face's prefix of ``part`` of MTP layer ``depth``.

        The layers of a hybrid's depth are parts, and each has a number.
        """
        if self.ahead_prefix is None:
            return self.layer_prefix.format(shape.num_layers + depth, stack="decoder")
        num_parts = len(shape.mtp_hybrid_override_pattern or "x")
        return self.ahead_prefix.format(depth * num_parts + part % num_parts)

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
            tail, part = found[4], -1 if found[4].startswith("final_") else int(found[3] or 0)
            prefix = self.prefix_of_depth(int(found[1]), shape, part)
            table = self.layer if found[2] else self.ahead
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


REQUIRED = object()
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu2": "squared_relu",
}
_WINDOWED, _FULL = "sliding_attention", "full_attention"
Convert = Callable[[Any], object]


def same(
    theirs: str,
    ours: str,
    default: object = REQUIRED,
    read: Convert | None = None,
    write: Convert | None = None,
) -> Field:
    """Convert a value that has one name in config.json and one in `ModelShape`.

    ``read`` and ``write`` convert between its two forms.  ``default`` replaces a missing entry: the
    default of their config class, or a function of config.json.
    """

    def from_theirs(config: Config) -> Values:
        value = config.get(theirs)
        if value is None:
            value = default(config) if callable(default) else default
        if value is REQUIRED:
            raise CheckpointError(f"config.json has no {theirs}")
        return {ours: value if read is None else read(value)}

    def from_ours(shape: ModelShape) -> Values:
        value = getattr(shape, ours)
        return {theirs: value if write is None else write(value)}

    return Field(from_theirs, from_ours)


def demand(*, is_required: bool = False, **values: object) -> Field:
    """Require the only values that can be converted; entries may be missing unless required."""

    def read(config: Config) -> Values:
        for theirs, value in values.items():
            found = config[theirs] if is_required else config.get(theirs, value)
            if found != value:
                raise CheckpointError(
                    f"config.json has {theirs} {found}: only {value} can be converted"
                )
        return {}

    return Field(read, lambda shape: values)


def activation(theirs: str, default: str, *others: str) -> Field:
    """Convert the activation of the MLP.

    It is read from the first of ``others`` and ``theirs`` that has a value, else it is ``default``.
    """

    def read(config: Config) -> Values:
        found = [config[name] for name in (*others, theirs) if config.get(name)]
        name = found[0] if found else default
        if name not in ACTIVATIONS:
            raise CheckpointError(f"config.json has {theirs} {name}, which is not built here")
        return {"activation": ACTIVATIONS[name]}

    def write(shape: ModelShape) -> Values:
        names = [name for name, ours in ACTIVATIONS.items() if ours == shape.activation]
        is_default = default in names or not names  # no name: `choose_family` refuses the family
        return {theirs: default if is_default else names[-1]}

    return Field(read, write)


def tied(default: bool) -> Field:
    """Convert whether the output layer shares the word embedding."""
    return same("tie_word_embeddings", "is_tied", default, bool)


def rope_of(config: Config) -> JsonObject:
    """Return config.json merged with its RoPE entries, which take precedence.

    These are ``rope_parameters`` in transformers 5, ``rope_theta`` and ``rope_scaling`` before it.
    """
    out = {"rope_theta": 10000.0, "partial_rotary_factor": 1.0, **config}
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    out |= {name: value for name, value in rope.items() if value is not None}
    out["rope_type"] = out.get("rope_type") or out.get("type") or "default"
    return out


def _read_rope(config: Config) -> Values:
    rope = rope_of(config)
    base = rope["rope_theta"]
    kind = rope["rope_type"]
    if base != int(base):
        raise CheckpointError(f"config.json has rope_theta {base}, which is not an integer")
    out = {"rotary_base": base, "rotary_percent": rope["partial_rotary_factor"]}
    kind = "longrope" if kind == "su" else kind
    if kind == "default":
        return out
    if kind not in _ROPE_TYPES:
        raise CheckpointError(f"config.json has rope_type {kind}, which no flag of ours asks for")
    for each in _ROPE_TYPES[kind][1]:
        out |= each.read(rope)
    return out


def _write_rope(shape: ModelShape) -> Values:
    """Write RoPE entries in the form that every version of transformers reads."""
    out: JsonObject = {"rope_theta": float(shape.rotary_base), "rope_scaling": None}
    if shape.rotary_percent != 1:
        out["partial_rotary_factor"] = shape.rotary_percent
    for kind, (name, entries) in _ROPE_TYPES.items():
        if getattr(shape, name) != getattr(ModelShape, name):
            out["rope_scaling"] = {"rope_type": kind}
            for each in entries:
                out["rope_scaling"] |= each.write(shape)
    if shape.longrope_short_factor is not None:
        out["original_max_position_embeddings"] = shape.longrope_original_max_position_embeddings
    return out


def rope_with(base: float = 1e4, part: float = 1.0) -> Field:
    """Convert RoPE entries whose defaults are another ``base`` and rotated ``part`` of a head."""
    defaults = {"rope_theta": base, "partial_rotary_factor": part}

    def write(shape: ModelShape) -> Values:
        written = {} if part == 1 else {"partial_rotary_factor": shape.rotary_percent}
        return {**_write_rope(shape), **written}

    return Field(lambda config: _read_rope({**defaults, **config}), write)


def _read_mscale(rope: Config) -> Values:
    mscale, of_all = rope.get("mscale"), rope.get("mscale_all_dim")
    given, rule = rope.get("attention_factor"), yarn_mscale(float(rope["factor"]))
    if given is not None and (mscale or of_all or not math.isclose(given, rule)):
        raise CheckpointError(
            f"config.json has attention_factor {given}: only the rule is built, which is {rule}"
        )
    if not mscale or not of_all:
        return {}
    return {"mscale": float(mscale), "mscale_all_dim": float(of_all)}


_LENGTH = "original_max_position_embeddings"


def _read_longrope_length(rope: Config) -> Values:
    length = rope[_LENGTH]
    most = rope["max_position_embeddings"]
    factor = rope.get("factor")
    if rope.get("attention_factor") is not None or factor not in (None, most / length):
        name = "factor" if rope.get("attention_factor") is None else "attention_factor"
        raise CheckpointError(
            f"config.json has {name} {rope[name]} of LongRoPE; cosines and sines are scaled by the "
            f"rule for max_position_embeddings {most} / {_LENGTH} {length} only"
        )
    return {f"longrope_{_LENGTH}": length}


# rope_type -> the value of ours that then differs from its default, entries of rope_scaling.
_ROPE_TYPES: dict[str, tuple[str, tuple[Field, ...]]] = {
    "linear": (
        "rotary_seq_len_interpolation_factor",
        (same("factor", "rotary_seq_len_interpolation_factor", write=float),),
    ),
    "longrope": (
        "longrope_short_factor",
        (
            same("short_factor", "longrope_short_factor", read=tuple),
            same("long_factor", "longrope_long_factor", read=tuple),
            Field(
                _read_longrope_length,
                lambda shape: {
                    "factor": shape.max_position_embeddings
                    / (shape.longrope_original_max_position_embeddings or 1)
                },
            ),
        ),
    ),
    "yarn": (
        "rotary_scaling_factor",
        (
            same("factor", "rotary_scaling_factor", read=float),
            same(_LENGTH, f"yarn_{_LENGTH}", lambda rope: rope["max_position_embeddings"]),
            same("beta_fast", "yarn_beta_fast", 32, float),
            same("beta_slow", "yarn_beta_slow", 1, float),
            same("truncate", "yarn_correction_range_round_to_int", True, bool),
            Field(
                _read_mscale,
                lambda shape: (
                    {"mscale": shape.mscale, "mscale_all_dim": shape.mscale_all_dim}
                    if shape.mscale_all_dim
                    else {}
                ),
            ),
        ),
    ),
    "llama3": (
        "rope_scaling_factor",
        (
            same("factor", "rope_scaling_factor", read=float),
            demand(
                is_required=True,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=8192,
            ),
        ),
    ),
}
ROPE = Field(_read_rope, _write_rope)


# Entries of a model that exists in transformers 5 only: the object rope_parameters, YaRN, and
# queries that grow with the logarithm of their position.
SCALED_QUERIES = Field(
    lambda config: {
        **_read_rope(config),
        "yarn_query_scaling_beta": rope_of(config).get("llama_4_scaling_beta"),
    },
    lambda shape: {
        "rope_parameters": {
            "rope_theta": float(shape.rotary_base),
            **(_write_rope(shape)["rope_scaling"] or {}),
            "llama_4_scaling_beta": shape.yarn_query_scaling_beta,
        }
    },
)


def _read_two_ropes(config: Config) -> Values:
    """Read the bases of layers without and with a window, in the form of either transformers."""
    ropes = config.get("rope_parameters") or {}
    bases = {"rope_theta": config.get("rope_theta", 1e6), **(config.get("rope_scaling") or {})}
    complete = {**bases, **ropes.get(_FULL, {})}
    windowed = {
        "rope_theta": config.get("rope_local_base_freq", 1e4),
        "rope_type": "default",
        **ropes.get(_WINDOWED, {}),
    }
    if windowed["rope_type"] != "default":
        raise CheckpointError(
            f"config.json has rope_type {windowed['rope_type']} of {_WINDOWED}: only default can "
            "be converted"
        )
    return {
        **_read_rope({**config, "rope_scaling": complete}),
        "window_rotary_base": windowed["rope_theta"],
    }


TWO_ROPES = Field(
    _read_two_ropes,
    lambda shape: {
        **_write_rope(shape),
        "rope_local_base_freq": float(shape.window_rotary_base or shape.rotary_base),
    },
)


def mrope(
    base: float, sections: tuple[int, ...], part: float = 1.0, *, is_interleaved: bool = True
) -> Field:
    """Convert RoPE entries of models whose positions have a time, a height and a width.

    The defaults are ``base``, ``sections`` and the rotated ``part`` of a head.
    """

    def read(config: Config) -> Values:
        defaults = {"rope_theta": base, "partial_rotary_factor": part, "mrope_section": sections}
        rope = rope_of({**defaults, **config})
        if rope["rope_type"] not in ("default", "mrope"):
            raise CheckpointError(
                f"config.json has rope_type {rope['rope_type']} beside mrope_section: only default "
                "can be converted"
            )
        return {
            **_read_rope({**config, "rope_scaling": {**rope, "rope_type": "default"}}),
            "position_embedding_type": "mrope",
            "mrope_section": tuple(rope["mrope_section"]),
            "mrope_interleaved": is_interleaved,
        }

    def write(shape: ModelShape) -> Values:
        rope: JsonObject = {"mrope_section": list(shape.mrope_section or ())}
        if not is_interleaved:  # the form that every version of transformers reads
            rope["type"] = "mrope"
            return {"rope_theta": float(shape.rotary_base), "rope_scaling": rope}
        rope |= {"rope_type": "default", "rope_theta": float(shape.rotary_base)}
        rope |= {"mrope_interleaved": True, "partial_rotary_factor": shape.rotary_percent}
        return {"rope_parameters": rope}

    return Field(read, write)


MROPE = mrope(1000000.0, (16, 24, 24), is_interleaved=False)


def windows(
    pattern: Callable[[Config, int], bool] | None = None,
    *,
    switch: bool = False,
    default: int | None = None,
) -> Field:
    """Convert sliding windows of all layers, or of those in ``layer_types`` or ``pattern``.

    Their window size counts the token itself, ours does not.  With ``switch``, windows are used
    only if ``use_sliding_window`` is set.  ``default`` replaces a missing size, but not null.
    """

    def read(config: Config) -> Values:
        count = config["num_hidden_layers"]
        size = config.get("sliding_window", default)
        if not size or (switch and not config.get("use_sliding_window", False)):
            return {"windows": (None,) * count}
        kinds = config.get("layer_types") if pattern else None
        if strange := {*(kinds or ())} - {_WINDOWED, _FULL}:
            raise CheckpointError(f"config.json has layer_types {', '.join(sorted(strange))}")
        seen = [
            kinds[i] == _WINDOWED if kinds else pattern is None or pattern(config, i)
            for i in range(count)
        ]
        return {"windows": tuple(size - 1 if is_seen else None for is_seen in seen)}

    def write(shape: ModelShape) -> Values:
        sizes = [window for window in shape.windows if window is not None]
        out: dict[str, object] = {"sliding_window": sizes[0] + 1 if sizes else None}
        if pattern is not None:
            kinds = [_FULL if window is None else _WINDOWED for window in shape.windows]
            out["layer_types"] = kinds
        if switch:
            out["use_sliding_window"] = bool(sizes)
            out["max_window_layers"] = [*(w is not None for w in shape.windows), True].index(True)
        return out

    return Field(read, write)


def alike(*names: str) -> tuple[Field, ...]:
    """Convert required values that have the same name in theirs and in ours."""
    return tuple(same(name, name) for name in names)


SIZES = (
    same("num_hidden_layers", "num_layers"),
    same("intermediate_size", "ffn_hidden_size"),
    *alike("hidden_size", "num_attention_heads", "max_position_embeddings", "vocab_size"),
)
LLAMA_FIELDS = (
    *SIZES,
    same("num_key_value_heads", "num_query_groups", None),
    same("attention_dropout", "attention_dropout", 0.0),
    ROPE,
)
HEAD_DIM = same("head_dim", "kv_channels", None)
LLAMA_OUTSIDE = {
    "embedding.word_embeddings": "model.embed_tokens",
    "decoder.final_layernorm": "model.norm",
    "output_layer": "lm_head",
}

"""Entries of config.json that several families have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megatron.core.config.errors import CheckpointError
from megatron.training.conversion.family import Config, Field
from megatron.training.conversion.shape import ModelShape

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


def same(theirs: str, ours: str, default: Any = REQUIRED) -> Field:
    """One number under two names; ``default`` is their class's where config.json has none."""

    def read(config: Config) -> dict[str, Any]:
        value = config.get(theirs)
        value = default if value is None else value
        if value is REQUIRED:
            raise CheckpointError(f"config.json has no {theirs}")
        return {ours: value}

    return Field(read, lambda shape: {theirs: getattr(shape, ours)})


def demand(theirs: str, value: Any) -> Field:
    """A switch that only one setting of is built here; absent, it has that setting."""

    def read(config: Config) -> dict[str, Any]:
        found = config.get(theirs, value)
        if found != value:
            raise CheckpointError(
                f"config.json has {theirs} {found}: only {value} can be converted"
            )
        return {}

    return Field(read, lambda shape: {theirs: value})


def activation(theirs: str, default: str, *others: str) -> Field:
    """The MLP's activation, under the first of some names that config.json has a value for."""

    def read(config: Config) -> dict[str, Any]:
        found = [config[name] for name in (*others, theirs) if config.get(name)]
        name = found[0] if found else default
        if name not in ACTIVATIONS:
            raise CheckpointError(f"config.json has {theirs} {name}, which is not built here")
        return {"activation": ACTIVATIONS[name]}

    def write(shape: ModelShape) -> dict[str, Any]:
        if ACTIVATIONS[default] == shape.activation:
            return {theirs: default}
        names = [name for name, ours in ACTIVATIONS.items() if ours == shape.activation]
        return {theirs: names[-1] if names else default}  # then it is not the family

    return Field(read, write)


def tied(default: bool) -> Field:
    """Whether the output layer is the word embedding."""

    def read(config: Config) -> dict[str, Any]:
        return {"is_tied": bool(config.get("tie_word_embeddings", default))}

    return Field(read, lambda shape: {"tie_word_embeddings": shape.is_tied})


def rope_of(config: Config) -> dict[str, Any]:
    """``rope_parameters`` of transformers 5, or ``rope_theta`` and ``rope_scaling`` before it."""
    out = {"rope_theta": config.get("rope_theta", 10000.0)}
    out["partial_rotary_factor"] = config.get("partial_rotary_factor", 1.0)
    out |= config.get("rope_scaling") or config.get("rope_parameters") or {}
    out["kind"] = out.get("rope_type") or out.get("type") or "default"
    return out


def _read_rope(config: Config) -> dict[str, Any]:
    rope = rope_of(config)
    if rope["rope_theta"] != int(rope["rope_theta"]):
        raise CheckpointError(
            f"config.json has rope_theta {rope['rope_theta']}, which is no integer"
        )
    out = {"rotary_base": rope["rope_theta"], "rotary_percent": rope["partial_rotary_factor"]}
    kind = rope["kind"]
    if kind == "linear":
        out["rotary_seq_len_interpolation_factor"] = rope["factor"]
    elif kind == "llama3":
        for name, built in _LLAMA3.items():
            if rope[name] != built:
                raise CheckpointError(f"config.json has {name} {rope[name]}: only {built} is built")
        out["rope_scaling_factor"] = float(rope["factor"])
    elif kind in ("longrope", "su"):
        original = rope.get("original_max_position_embeddings")
        out["longrope_short_factor"] = tuple(rope["short_factor"])
        out["longrope_long_factor"] = tuple(rope["long_factor"])
        out["longrope_original_max_position_embeddings"] = (
            original or config["original_max_position_embeddings"]
        )
    elif kind == "yarn":
        out |= yarn(rope, config)
    elif kind != "default":
        raise CheckpointError(f"config.json has rope_type {kind}, which no flag of ours asks for")
    return out


def yarn(rope: Config, config: Config) -> dict[str, Any]:
    """What YaRN is told, with what it has where it is not told."""
    if rope.get("attention_factor") is not None:
        raise CheckpointError(
            f"config.json has attention_factor {rope['attention_factor']}: only the rule is built"
        )
    mscale, of_all = rope.get("mscale"), rope.get("mscale_all_dim")
    length = rope.get("original_max_position_embeddings") or config["max_position_embeddings"]
    return {
        "rotary_scaling_factor": float(rope["factor"]),
        "yarn_original_max_position_embeddings": length,
        "yarn_beta_fast": float(rope.get("beta_fast") or 32),
        "yarn_beta_slow": float(rope.get("beta_slow") or 1),
        "yarn_correction_range_round_to_int": bool(rope.get("truncate", True)),
        "mscale": float(mscale) if mscale and of_all else 1.0,
        "mscale_all_dim": float(of_all) if mscale and of_all else 0.0,
    }


def yarn_entries(shape: ModelShape) -> dict[str, Any]:
    """The entries that `yarn` reads."""
    out = {
        "rope_type": "yarn",
        "factor": shape.rotary_scaling_factor,
        "original_max_position_embeddings": shape.yarn_original_max_position_embeddings,
        "beta_fast": shape.yarn_beta_fast,
        "beta_slow": shape.yarn_beta_slow,
        "truncate": shape.yarn_correction_range_round_to_int,
    }
    if shape.mscale_all_dim:
        out |= {"mscale": shape.mscale, "mscale_all_dim": shape.mscale_all_dim}
    return out


_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _write_rope(shape: ModelShape) -> dict[str, Any]:
    """In the spelling that every version of transformers reads."""
    out: dict[str, Any] = {"rope_theta": float(shape.rotary_base), "rope_scaling": None}
    if shape.rotary_percent != 1:
        out["partial_rotary_factor"] = shape.rotary_percent
    if shape.rope_scaling_factor is not None:
        out["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": shape.rope_scaling_factor,
            **_LLAMA3,
        }
    elif shape.rotary_scaling_factor != 1:
        out["rope_scaling"] = yarn_entries(shape)
    elif shape.rotary_seq_len_interpolation_factor is not None:
        factor = float(shape.rotary_seq_len_interpolation_factor)
        out["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    elif shape.longrope_short_factor is not None:
        original = shape.longrope_original_max_position_embeddings
        out["rope_scaling"] = {
            "rope_type": "longrope",
            "short_factor": shape.longrope_short_factor,
            "long_factor": shape.longrope_long_factor,
            "factor": shape.max_position_embeddings / (original or 1),
        }
        out["original_max_position_embeddings"] = original
    return out


ROPE = Field(_read_rope, _write_rope)


def windows(pattern: Callable[[Config, int], bool] | None = None, *, switch: bool = False) -> Field:
    """Sliding windows: of all layers, or of those that ``layer_types`` or ``pattern`` name.

    Their window counts the token itself.  ``switch``: ``use_sliding_window`` turns them on.
    """

    def read(config: Config) -> dict[str, Any]:
        count, size = config["num_hidden_layers"], config.get("sliding_window")
        if not size or (switch and not config.get("use_sliding_window", False)):
            return {"windows": (None,) * count}
        kinds = config.get("layer_types") if pattern else None
        seen = [
            kinds[i] == _WINDOWED if kinds else pattern is None or pattern(config, i)
            for i in range(count)
        ]
        return {"windows": tuple(size - 1 if is_seen else None for is_seen in seen)}

    def write(shape: ModelShape) -> dict[str, Any]:
        sizes = [window for window in shape.windows if window is not None]
        out: dict[str, Any] = {"sliding_window": sizes[0] + 1 if sizes else None}
        if pattern is not None:
            kinds = [_FULL if window is None else _WINDOWED for window in shape.windows]
            out["layer_types"] = kinds
        if switch:
            out["use_sliding_window"] = bool(sizes)
            out["max_window_layers"] = [*(w is not None for w in shape.windows), True].index(True)
        return out

    return Field(read, write)


SIZES = (
    same("num_hidden_layers", "num_layers"),
    same("hidden_size", "hidden_size"),
    same("intermediate_size", "ffn_hidden_size"),
    same("num_attention_heads", "num_attention_heads"),
    same("max_position_embeddings", "max_position_embeddings"),
    same("vocab_size", "vocab_size"),
)
LLAMA_FIELDS = (
    *SIZES,
    same("num_key_value_heads", "num_query_groups", None),
    same("attention_dropout", "attention_dropout", 0.0),
    ROPE,
)
HEAD_DIM = same("head_dim", "kv_channels", None)


def norm(default: float) -> Field:
    """The epsilon of RMSNorm."""
    return same("rms_norm_eps", "norm_epsilon", default)


LLAMA_OUTSIDE: Mapping[str, str] = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}

"""What each layer of a model found by architecture search looks like, read from its JSON.

The file is the `config.json` of a Llama-Nemotron checkpoint; of it ``block_configs`` counts, one
entry a layer, and the sizes that must agree with the command line.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch.nn.functional as F

from megatron.core.config.errors import ConfigError
from megatron.core.transformer.transformer_config import TransformerConfig

FLAG = "--heterogeneous-layers-config-path"
FULL, LINEAR, NO_OP = "full", "linear", "no_op"
_WIDTH_MULTIPLE = 256


@dataclass(frozen=True)
class LayerShape:
    """``attention`` and ``mlp`` are full, replaced by one matrix (linear), or absent (no_op)."""

    attention: str
    mlp: str
    ffn_hidden_size: int | None = None


@lru_cache(maxsize=8)
def layer_shapes(config: TransformerConfig) -> tuple[LayerShape, ...] | None:
    """The shape of every layer; None where the config describes no differences.

    Raises ConfigError where the file cannot be read or contradicts the command line.
    """
    text = config.heterogeneous_layers_config_encoded_json
    path = config.heterogeneous_layers_config_path
    if not text and path is None:
        return None
    try:
        param_info_for = json.loads(text or Path(path or "").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{FLAG} {path or text} cannot be read: {error}") from error
    if not isinstance(param_info_for, dict) or not isinstance(
        param_info_for.get("block_configs"), list
    ):
        raise ConfigError(f"{FLAG} {path or text} has no list block_configs")
    problems = _contradictions(param_info_for, config)
    if problems:
        raise ConfigError("; ".join(problems))
    return tuple(_layer(block, config.hidden_size) for block in param_info_for["block_configs"])


def _contradictions(param_info_for: Mapping[str, Any], config: TransformerConfig) -> list[str]:
    """What the file says otherwise than the command line."""
    blocks = param_info_for["block_configs"]
    sizes = {b["attention"].get("n_heads_in_group") for b in blocks if b.get("attention")} - {None}
    if len(sizes) > 1:
        return [f"{FLAG}: n_heads_in_group must be one number for all layers, not {sorted(sizes)}"]
    heads = param_info_for.get("num_attention_heads", config.num_attention_heads)
    groups = heads // next(iter(sizes)) if sizes else config.num_query_groups
    is_swiglu = config.gated_linear_unit and config.activation_func is F.silu
    pairs = (
        ("--num-layers", len(blocks), config.num_layers),
        (
            "--hidden-size",
            param_info_for.get("hidden_size", config.hidden_size),
            config.hidden_size,
        ),
        ("--num-attention-heads", heads, config.num_attention_heads),
        ("--num-query-groups", groups, config.num_query_groups),
        ("--normalization", "RMSNorm", config.normalization),
        (
            "the activation",
            param_info_for.get("hidden_act", "silu"),
            "silu" if is_swiglu else "another",
        ),
    )
    return [
        f"{FLAG} describes {theirs} where {name} is {ours}: make them equal"
        for name, theirs, ours in pairs
        if theirs != ours
    ]


def _layer(block: Mapping[str, Any], hidden_size: int) -> LayerShape:
    attention, mlp = _kind(block.get("attention") or {}), _kind(block.get("ffn") or {})
    if mlp != FULL:
        return LayerShape(attention, mlp)
    factor = block["ffn"].get("ffn_mult")
    if factor is None:
        raise ConfigError(f"{FLAG}: an ffn block without ffn_mult, no_op or replace_with_linear")
    return LayerShape(attention, mlp, width_of(factor, hidden_size))


def _kind(part: Mapping[str, Any]) -> str:
    if part.get("no_op"):
        return NO_OP
    return LINEAR if part.get("replace_with_linear") else FULL


def width_of(ffn_mult: float, hidden_size: int) -> int:
    """MLP width for a multiplier: two thirds of it, up to the next multiple of 256."""
    width = int(2 * ffn_mult * hidden_size / 3)
    return -(-width // _WIDTH_MULTIPLE) * _WIDTH_MULTIPLE

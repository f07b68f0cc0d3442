"""Layer shapes of a heterogeneous model, read from JSON (--heterogeneous-layers-config-path).

The file is the `config.json` of a Llama-Nemotron checkpoint.  ``block_configs``, with one entry per
layer, gives the shapes; sizes such as ``hidden_size`` must equal those of the command line; the
rest is ignored.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch.nn.functional as F

from megatron.core.config.errors import ConfigError
from megatron.core.transformer.transformer_config import TransformerConfig

FLAG = "--heterogeneous-layers-config-path"
FULL, LINEAR, NO_OP = "full", "linear", "no_op"
_WIDTH_MULTIPLE = 256
_LARGEST = 1 << 20  # width of an MLP


@dataclass(frozen=True)
class LayerShape:
    """The shape of one layer.

    ``attention`` and ``mlp``: "full", "linear" (replaced by one square linear layer) or "no_op"
    (absent).  ``ffn_hidden_size``: width of a full MLP.
    """

    attention: str
    mlp: str
    ffn_hidden_size: int | None = None


@lru_cache(maxsize=8)
def layer_shapes(config: TransformerConfig) -> tuple[LayerShape, ...] | None:
    """Return the shape of every layer; None if the model is not heterogeneous.

    Raises ConfigError if the JSON cannot be read or contradicts the command line.
    """
    text = config.heterogeneous_layers_config_encoded_json
    path = config.heterogeneous_layers_config_path
    if not text and not path:
        return None
    try:
        found: Any = json.loads(text or Path(path or "").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{FLAG} {str(path or text)[:200]} cannot be read: {error}") from error
    if not isinstance(found, dict) or not isinstance(found.get("block_configs"), list):
        raise ConfigError(f"{FLAG} {str(path or text)[:200]} has no list block_configs")
    try:
        problems = _contradictions(found, config)
        if not problems:
            return tuple(_layer(block, config.hidden_size) for block in found["block_configs"])
    except (TypeError, AttributeError, ValueError, ArithmeticError) as error:
        raise ConfigError(f"{FLAG} has a value that no such model has: {error!s:.200}") from error
    raise ConfigError(f"{FLAG}: {'; '.join(problems)}")


def _contradictions(found: dict[str, Any], config: TransformerConfig) -> list[str]:
    """Return an error message for each size in the file that differs from the command line."""
    blocks = found["block_configs"]
    given = [(block.get("attention") or {}).get("n_heads_in_group") for block in blocks]
    sizes = {size for size in given if size is not None}
    if len(sizes) > 1:
        return [f"n_heads_in_group must be one number for all layers, not {sorted(sizes)}"]
    heads = found.get("num_attention_heads", config.num_attention_heads)
    groups = heads // next(iter(sizes)) if sizes else config.num_query_groups
    is_swiglu = config.gated_linear_unit and config.activation_func is F.silu
    pairs = (
        ("--num-layers", len(blocks), config.num_layers),
        ("--hidden-size", found.get("hidden_size", config.hidden_size), config.hidden_size),
        ("--num-attention-heads", heads, config.num_attention_heads),
        ("--num-query-groups", groups, config.num_query_groups),
        ("--normalization", "RMSNorm", config.normalization),
        ("the activation", found.get("hidden_act", "silu"), "silu" if is_swiglu else "another"),
    )
    return [
        f"it describes {theirs!s:.80} where {name} is {ours}: make them equal"
        for name, theirs, ours in pairs
        if theirs != ours
    ]


def _layer(block: dict[str, Any], hidden_size: int) -> LayerShape:
    ffn = block.get("ffn") or {}
    attention, mlp = _kind(block.get("attention") or {}), _kind(ffn)
    if mlp != FULL:
        return LayerShape(attention, mlp)
    factor = ffn.get("ffn_mult")
    if factor is None:
        raise ConfigError("an ffn block without ffn_mult, no_op or replace_with_linear")
    width = width_of(factor, hidden_size)
    if not 0 < width <= _LARGEST:
        raise ConfigError(f"ffn_mult {factor} gives an MLP of width {width}")
    return LayerShape(attention, mlp, width)


def _kind(part: dict[str, Any]) -> str:
    if part.get("no_op"):
        return NO_OP
    return LINEAR if part.get("replace_with_linear") else FULL


def width_of(ffn_mult: float, hidden_size: int) -> int:
    """Return the MLP width: 2/3 of ``ffn_mult * hidden_size``, rounded up to a multiple of 256."""
    width = int(2 * ffn_mult * hidden_size / 3)
    return -(-width // _WIDTH_MULTIPLE) * _WIDTH_MULTIPLE


@dataclass(kw_only=True)
class HeterogeneousTransformerConfig(TransformerConfig):
    """Configuration of layers of different shapes.

    The JSON becomes a part of it, so that checkpoints contain it.
    """

    heterogeneous_layers_config_path: str | None = ""
    heterogeneous_layers_config_encoded_json: str | None = ""

    def derive(self) -> None:
        """Read the file of the layers."""
        super().derive()
        self.heterogeneous_block_specs = True
        path = self.heterogeneous_layers_config_path
        if path and not self.heterogeneous_layers_config_encoded_json:
            self.heterogeneous_layers_config_encoded_json = Path(path).read_text(encoding="utf-8")

    @property
    def per_block_parameters(self) -> tuple[LayerShape, ...]:
        """Shape of each layer.  Raises ConfigError if the JSON does not describe this model."""
        return layer_shapes(self) or ()

    def get_config_for_layer(self, layer_number: int) -> TransformerConfig:
        """Return the config of layer ``layer_number`` (from 1), with the width of its MLP."""
        shapes = self.per_block_parameters
        if not 1 <= layer_number <= len(shapes):
            raise ValueError(f"layer number {layer_number} is not between 1 and {len(shapes)}")
        width = shapes[layer_number - 1].ffn_hidden_size
        return self if width is None else replace(self, ffn_hidden_size=width)

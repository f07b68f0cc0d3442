"""What Megatron-LM's formats call a tensor, what it is called here, and how it is cut.  No torch.

The folder formats of `torch_dist` use the names of its Transformer Engine layers whatever layers
ran; per-rank files have the names of the layers that ran, and old ones those of models before core.
"""

from __future__ import annotations

import re
from typing import NamedTuple

# Pattern of a part of a name -> what it is called here; every rule is tried, in order.
_RENAMES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        # Models before core.
        (r"^language_model\.embedding\.", "embedding."),
        (r"^language_model\.output_layer\.", "output_layer."),
        (r"^language_model\.(encoder|transformer)\.", "decoder."),
        (r"^decoder\.final_norm\.", "decoder.final_layernorm."),
        (r"\.input_norm\.", ".input_layernorm."),
        (r"\.attention\.", ".self_attention."),
        (r"\.query_key_value\.", ".linear_qkv."),
        (r"\.self_attention\.dense\.", ".self_attention.linear_proj."),
        (r"\.post_attention_(layer)?norm\.", ".pre_mlp_layernorm."),
        (r"\.dense_h_to_4h\.", ".linear_fc1."),
        (r"\.dense_4h_to_h\.", ".linear_fc2."),
        # Norms that Transformer Engine keeps in the linear layer after them.
        (r"\.self_attention\.linear_qkv\.layer_norm_(weight|bias)$", r".input_layernorm.\1"),
        (r"\.mlp\.linear_fc1\.layer_norm_(weight|bias)$", r".pre_mlp_layernorm.\1"),
    )
)
# The last two rules backwards: the names of layers that keep the norm before them.
_FUSED = (
    (re.compile(r"\.input_layernorm\.(weight|bias)$"), r".self_attention.linear_qkv.layer_norm_\1"),
    (re.compile(r"\.pre_mlp_layernorm\.(weight|bias)$"), r".mlp.linear_fc1.layer_norm_\1"),
)
# Tail of a name here -> the dimension that tensor parallelism cuts; others are the same everywhere.
_CUT = (
    (re.compile(r"(^|\.)(word_embeddings|output_layer)\.(weight|bias)$"), 0),
    (re.compile(r"\.(linear_qkv|linear_q|linear_kv|linear_fc1)\.(weight|bias)$"), 0),
    (re.compile(r"\.(linear_proj|linear_fc2)\.weight$"), 1),
)
_VOCABULARY = re.compile(r"(^|\.)(word_embeddings|output_layer)\.(weight|bias)$")
_GATED = re.compile(r"\.linear_fc1\.(weight|bias)$")
_LAYER = re.compile(r"^(.*\blayers)\.(\d+)\.(.*)$")
_STACK = re.compile(r"^(.*\blayers)\.(?!\d)(.*)$")
_STATE = re.compile(r"^(?:chained_\d+\.)?(optimizer\.state\.\w+?\.)?(.*)$")
OUTPUT = "output_layer.weight"


class Cut(NamedTuple):
    """The dimension that is cut (None: none is), and the equal blocks it is made of."""

    dim: int | None
    num_blocks: int = 1


def our_name(name: str) -> str:
    """The name here of a tensor of the model."""
    for pattern, replacement in _RENAMES:
        name = pattern.sub(replacement, name)
    return name


def fused_name(name: str) -> str:
    """What layers of Transformer Engine call the tensor of our ``name``."""
    for pattern, replacement in _FUSED:
        name = pattern.sub(replacement, name)
    return name


def cut_of(name: str, *, is_gated: bool = False) -> Cut:
    """How tensor parallelism cuts the tensor of our ``name``."""
    for pattern, dim in _CUT:
        if pattern.search(name):
            return Cut(dim, 2 if is_gated and _GATED.search(name) else 1)
    return Cut(None)


def is_vocabulary(name: str) -> bool:
    """Whether the first dimension counts tokens, with padding behind them."""
    return _VOCABULARY.search(name) is not None


def split_layer(name: str) -> tuple[str, int, str] | None:
    """(``decoder.layers``, number, the rest); None outside of layers.

    >>> split_layer("decoder.layers.3.mlp.linear_fc1.weight")
    ('decoder.layers', 3, 'mlp.linear_fc1.weight')
    """
    found = _LAYER.match(name)
    return (found[1], int(found[2]), found[3]) if found else None


def split_stack(name: str) -> tuple[str, str] | None:
    """(``decoder.layers``, the rest) for the tensor that holds it of all layers; else None."""
    found = _STACK.match(name)
    return (found[1], found[2]) if found else None


def split_state(key: str) -> tuple[str, str]:
    """(``optimizer.state.exp_avg.`` or empty, the name of the parameter)."""
    found = _STATE.match(key)
    assert found is not None
    return found[1] or "", found[2]

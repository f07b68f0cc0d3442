"""Rules of tensor names that modules and the formats of Megatron-LM share.  No torch."""

from __future__ import annotations

import re

# Pattern of a norm -> its name in the linear layer that Transformer Engine fuses it with.
_INPUT = r"\.input_layernorm\.(weight|bias)$", r".self_attention.linear_qkv.layer_norm_\1"
_LINEAR = r"\.input_layernorm\.(weight|bias)$", r".self_attention.in_proj.layer_norm_\1"
_MIXER = r"(\.layers\.\d+)\.norm\.(weight|bias)$", r"\1.mixer.in_proj.layer_norm_\2"
_MLP = r"\.pre_mlp_layernorm\.(weight|bias)$", r".mlp.linear_fc1.layer_norm_\1"
_LATENT = r"\.(q|kv)_layernorm\.(weight|bias)$", r".linear_\1_up_proj.layer_norm_\2"
VOCABULARY = (
    r"(^|\.)((word_embeddings|output_layer)\.(weight|bias)"
    r"|word_embeddings\.lora\.a|output_layer\.lora\.[bm])$"
)
# End of a name -> blocks concatenated in it.  A Mamba mixer: gate, input, two projections, time
# steps.  Linear attention: query, key, value, gate, and the rates of correction and decay.
MIXER_BLOCKS = {
    **dict.fromkeys(
        (f".mixer.in_proj.{own}" for own in ("weight", "lora.b", "lora.m")),
        ("z", "x", "B", "C", "dt"),
    ),
    **dict.fromkeys((".mixer.conv1d.weight", ".mixer.conv1d.bias"), ("x", "B", "C")),
    **dict.fromkeys(
        (f".self_attention.in_proj.{own}" for own in ("weight", "lora.b", "lora.m")),
        ("query", "key", "value", "z", "beta", "alpha"),
    ),
    ".self_attention.conv1d.weight": ("query", "key", "value"),
}
HALVES = ("_w", "_v")  # suffixes of the two halves of a gated layer, if saved separately


def is_vocabulary(name: str) -> bool:
    """Return whether the first dimension is the vocabulary, with padding at its end."""
    return re.search(VOCABULARY, name) is not None


def with_fused_norms(
    name: str, *, is_latent: bool, has_experts: bool, is_linear: bool = False
) -> str:
    """Return the Transformer Engine name of a tensor of a layer with such parts."""
    rules = [_LATENT if is_latent else _LINEAR if is_linear else _INPUT, _MIXER]
    if not has_experts:
        rules.append(_MLP)
    for pattern, replacement in rules:
        name = re.sub(pattern, replacement, name)
    return name


def block_names(name: str, count: int) -> list[str]:
    """Return the names of the ``count`` blocks of a tensor."""
    found = next((blocks for tail, blocks in MIXER_BLOCKS.items() if name.endswith(tail)), ())
    return list(found) if len(found) == count else [f"block_{i}" for i in range(count)]

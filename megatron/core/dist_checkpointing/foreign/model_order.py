"""The order in which the modules of Megatron-LM register the parameters of a GPT.  No torch."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from megatron.core.dist_checkpointing.foreign.names import OUTPUT, fused_name, split_layer

_SHARED = "embedding.word_embeddings.weight"
# The order in which Megatron-LM's modules register their parameters; None: a state of the layer.
_LAYER_ORDER = (
    "input_layernorm.weight",
    "input_layernorm.bias",
    "self_attention.linear_proj.weight",
    "self_attention.linear_proj.bias",
    "self_attention.linear_proj._extra_state",
    "self_attention.linear_qkv.weight",
    "self_attention.linear_qkv.bias",
    "self_attention.linear_qkv._extra_state",
    "self_attention.q_layernorm.weight",
    "self_attention.q_layernorm.bias",
    "self_attention.k_layernorm.weight",
    "self_attention.k_layernorm.bias",
    "pre_mlp_layernorm.weight",
    "pre_mlp_layernorm.bias",
    "mlp.linear_fc1.weight",
    "mlp.linear_fc1.bias",
    "mlp.linear_fc1._extra_state",
    "mlp.linear_fc2.weight",
    "mlp.linear_fc2.bias",
    "mlp.linear_fc2._extra_state",
)
# The same where a linear layer keeps the norm before it.
_FUSED_ORDER = (
    *_LAYER_ORDER[2:5],
    *(*_LAYER_ORDER[0:2], *_LAYER_ORDER[5:12]),
    *(*_LAYER_ORDER[12:14], *_LAYER_ORDER[14:]),
)
_BEFORE = (_SHARED, "embedding.position_embeddings.weight", "embedding.tokentype_embeddings.weight")
_AFTER = ("decoder.final_layernorm.weight", "decoder.final_layernorm.bias", OUTPUT)
_OUTPUT_STATE = "output_layer._extra_state"


def ordered_names(
    stored: Collection[str],
    *,
    is_fused: bool,
    layers: Sequence[int] | None = None,
    is_first: bool = True,
    is_last: bool = True,
) -> Iterator[tuple[str, str]]:
    """(name in a file, our name) of the tensors of a model chunk, in the order of the model.

    ``layers``: those of the chunk, None is all.  The second is empty for a state that a layer has
    none of.
    """
    if layers is None:
        layers = sorted({layer[1] for layer in map(split_layer, stored) if layer})
    if is_first:
        yield from ((name, name) for name in _BEFORE if name in stored)
    for local, number in enumerate(layers):
        for tail in _FUSED_ORDER if is_fused else _LAYER_ORDER:
            name = f"decoder.layers.{number}.{tail}"
            here = f"decoder.layers.{local}.{tail}"
            if tail.endswith("_extra_state"):
                yield here, ""
            elif name in stored:
                yield fused_name(here) if is_fused else here, name
    if is_last:
        yield from ((name, name) for name in _AFTER if name in stored)
        if not is_first and OUTPUT not in stored:
            yield OUTPUT, _SHARED
        yield _OUTPUT_STATE, ""

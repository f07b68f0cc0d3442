"""The order in which Megatron-LM's modules register the parameters of a model.  No torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from megatron.core.config.value_types import Arguments
from megatron.core.dist_checkpointing.megatron_formats.names import (
    OUTPUT,
    fused_name,
    split_layer,
    stored_layer_has_experts,
)

_SHARED = "embedding.word_embeddings.weight"
_EMBEDDINGS = (
    _SHARED,
    "embedding.position_embeddings.weight",
    "embedding.tokentype_embeddings.weight",
    "encoder_relative_pos_emb.relative_attention_bias.weight",
    "decoder_relative_pos_emb.relative_attention_bias.weight",
)
_STATE = "_extra_state"


def ordered_names(
    stored: Collection[str],
    arguments: Arguments,
    *,
    layers: Sequence[int] | None = None,
    experts: Sequence[int] = (),
    is_first: bool = True,
    is_last: bool = True,
) -> Iterator[tuple[str, str]]:
    """Yield (name in a file, our name) of the tensors of a model chunk, in the order of the model.

    ``layers``: layer numbers of the chunk, None for all; ``experts``: expert numbers of the rank.
    Our name is empty for an ``_extra_state`` entry, which has no tensor.
    """
    if layers is None:
        layers = sorted({layer[1] for layer in map(split_layer, stored) if layer})
    if is_first:
        yield from ((name, name) for name in _EMBEDDINGS if name in stored)
    for stack in ("encoder", "decoder"):
        for local, number in enumerate(layers):
            places = f"{stack}.layers.{local}.", f"{stack}.layers.{number}."
            yield from _of_layer(stored, arguments, places, _in_layer(number, arguments, experts))
        if is_last:
            norms = (f"{stack}.final_{norm}" for norm in ("layernorm", "norm"))
            yield from _present(stored, *(pair for norm in norms for pair in _norm(norm)))
    if is_last:
        # MTP layers need one stage: with more, Megatron-LM also stores a copy of the embedding.
        for depth in range(int(arguments.get("mtp_num_layers") or 0) if is_first else 0):
            place = f"mtp.layers.{depth}."
            tails = _ahead(int(arguments["num_layers"]) - 1, arguments, experts)
            yield from _of_layer(stored, arguments, (place, place), tails)
        yield from _present(stored, *_linear("lm_head.dense"), *_norm("lm_head.layer_norm"))
        yield from _present(stored, (OUTPUT, OUTPUT))
        if not is_first and OUTPUT not in stored:
            yield OUTPUT, _SHARED
        yield f"output_layer.{_STATE}", ""
        biases = "output_layer.bias", f"lm_head.{OUTPUT}", "lm_head.output_layer.bias"
        yield from _present(stored, *((name, name) for name in biases))
        yield from _present(stored, *_linear("binary_head"), *_linear("pooler.dense"))


def _present(stored: Collection[str], *pairs: tuple[str, str]) -> Iterator[tuple[str, str]]:
    return (pair for pair in pairs if pair[1] in stored)


def _of_layer(
    stored: Collection[str],
    arguments: Arguments,
    places: tuple[str, str],
    tails: Iterable[tuple[str, str]],
) -> Iterator[tuple[str, str]]:
    """Yield names of the stored tensors of a layer; ``places``: name prefixes in a file, ours."""
    for there, tail in tails:
        name = places[1] + tail
        if name in stored:
            whole = places[1] + there
            named = fused_name(whole, arguments) if _is_fused(arguments) else whole
            local = places[0] + named.removeprefix(places[1])
            yield local, "" if there.endswith(_STATE) else name


def _is_fused(arguments: Arguments) -> bool:
    return arguments.get("transformer_impl") == "transformer_engine"


def _ahead(number: int, arguments: Arguments, experts: Sequence[int]) -> Iterator[tuple[str, str]]:
    yield from (*_norm("enorm"), *_norm("hnorm"), *_matrix("eh_proj"))
    for there, ours in _in_layer(number, arguments, experts):
        yield f"transformer_layer.{there}", f"transformer_layer.{ours}"
    yield from _norm("final_layernorm")


def _in_layer(
    number: int, arguments: Arguments, experts: Sequence[int]
) -> Iterator[tuple[str, str]]:
    """Yield (end of the name in a file, end of our name).

    For an ``_extra_state`` entry, the second is that of the weight it belongs to.
    """
    is_fused = _is_fused(arguments)
    yield from _mixer(is_fused)
    yield _SINK, _SINK
    is_latent = bool(arguments.get("multi_latent_attention"))
    first, projection = _norm("input_layernorm"), _matrix("self_attention.linear_proj")
    is_inside = is_fused and not is_latent  # the norm is fused into the following matrix
    yield from (*projection, *first) if is_inside else (*first, *projection)
    for part in _latent_attention(is_fused) if is_latent else _ATTENTION:
        kind = _norm if part.endswith("norm") else _matrix
        yield from kind(f"self_attention.{part}")
    yield from _norm("pre_cross_attn_layernorm")
    for part in ("proj", "q", "kv"):
        yield from _matrix(f"cross_attention.linear_{part}")
    yield from _norm("pre_mlp_layernorm")
    if not stored_layer_has_experts(number, arguments):
        yield from (*_matrix("mlp.linear_fc1"), *_matrix("mlp.linear_fc2"))
        return
    for tail in ("weight", "bias", "expert_bias"):
        yield f"mlp.router.{tail}", f"mlp.router.{tail}"
    yield from _of_experts(experts, is_grouped=is_fused and bool(arguments.get("moe_grouped_gemm")))
    yield "mlp.shared_experts.gate_weight", "mlp.shared_experts.gate_weight"
    for matrix in _MATRICES:
        yield from _matrix(f"mlp.shared_experts.{matrix}")


def _mixer(is_fused: bool) -> Iterator[tuple[str, str]]:
    yield from ((f"mixer.{name}",) * 2 for name in ("dt_bias", "A_log", "D"))
    norm, inside = _norm("norm"), _linear("mixer.conv1d")
    first = (*norm, *_matrix("mixer.in_proj")) if is_fused else _matrix("mixer.in_proj")
    yield from (*first, *inside, *_norm("mixer.norm"), *_matrix("mixer.out_proj"))
    yield from () if is_fused else norm


_SINK = "self_attention.core_attention.softmax_offset"
_MATRICES = ("linear_fc1", "linear_fc2")
_ATTENTION = ("linear_qkv", "q_layernorm", "k_layernorm")


def _latent_attention(is_fused: bool) -> tuple[str, ...]:
    """Return the parts of latent attention in order; a fused norm precedes its matrix."""
    if is_fused:
        down_up = ("linear_q_down_proj", "q_layernorm", "linear_q_up_proj")
        return ("linear_q_proj", *down_up, "linear_kv_down_proj", "kv_layernorm", _KV_UP)
    matrices = ("linear_q_proj", "linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj")
    return (*matrices, _KV_UP, "q_layernorm", "kv_layernorm")


_KV_UP = "linear_kv_up_proj"


def _of_experts(experts: Sequence[int], *, is_grouped: bool) -> Iterator[tuple[str, str]]:
    if not is_grouped:
        for local, number in enumerate(experts):
            for matrix in _MATRICES:
                ours = _matrix(f"mlp.experts.local_experts.{number}.{matrix}")
                theirs = _matrix(f"mlp.experts.local_experts.{local}.{matrix}")
                yield from ((there[0], our[1]) for there, our in zip(theirs, ours, strict=True))
        return
    for matrix in _MATRICES:
        for kind in ("weight", "bias"):
            for local, number in enumerate(experts):
                ours_tail = f"mlp.experts.local_experts.{number}.{matrix}.{kind}"
                yield f"mlp.experts.{matrix}.{kind}{local}", ours_tail
        if experts:
            first = f"mlp.experts.local_experts.{experts[0]}.{matrix}.weight"
            yield f"mlp.experts.{matrix}.{_STATE}", first


def _linear(name: str) -> tuple[tuple[str, str], ...]:
    """Return the names of a matrix or convolution without ``_extra_state``."""
    return _norm(name)


def _norm(name: str) -> tuple[tuple[str, str], ...]:
    return tuple((f"{name}.{kind}",) * 2 for kind in ("weight", "bias"))


def _matrix(name: str) -> tuple[tuple[str, str], ...]:
    weight, bias = f"{name}.weight", f"{name}.bias"
    return (weight, weight), (bias, bias), (f"{name}.{_STATE}", weight)

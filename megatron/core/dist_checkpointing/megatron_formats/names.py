"""Tensor names of Megatron-LM's formats: their names here, sharding and order.  No torch.

Format `torch_dist` uses the names of Transformer Engine layers, whichever layers ran.  The per-rank
files of format `torch` use the names of the layers that ran; old files those of models before
Megatron Core.

Experts: in `torch_dist` all experts of a layer are one tensor, ``mlp.experts.experts.linear_fc1
.weight``, with the expert number as a dimension after that of the layer; or they are separate
tensors with the number after the second ``experts``.  In per-rank files they are numbered from 0 on
each rank: ``local_experts.N.linear_fc1.weight`` (sequential), ``linear_fc1.weightN`` (grouped), or
``weight1`` and ``weight2``, with all experts of a rank in one transposed tensor (older grouped).
Layers of a hybrid model are not stacked.  Matrices of a mixer consist of blocks, each of which is a
separate tensor in `torch_dist`.

No checkpoint of Megatron-LM with experts, latent attention, mixers, an encoder or its heads was
available: their rules are inferred from public descriptions of core_v0.14, not verified on files.

``arguments`` is the command line of the run that wrote the checkpoint, dest -> value.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from megatron.core.config.value_types import Arguments

# Pattern of a part of a name -> this project's name; all rules are applied, in order.
_BEFORE_CORE = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"^language_model\.embedding\.", "embedding."),
        (r"^language_model\.output_layer\.", "output_layer."),
        (r"^language_model\.(encoder|transformer)\.final_norm\.", "decoder.final_layernorm."),
        (r"^language_model\.(encoder|transformer)\.", "decoder."),
        (r"\.input_norm\.", ".input_layernorm."),
        (r"\.attention\.", ".self_attention."),
        (r"\.query_key_value\.", ".linear_qkv."),
        (r"\.self_attention\.dense\.", ".self_attention.linear_proj."),
        (r"\.post_attention_(layer)?norm\.", ".pre_mlp_layernorm."),
        (r"\.dense_h_to_4h\.", ".linear_fc1."),
        (r"\.dense_4h_to_h\.", ".linear_fc2."),
    )
)
_RENAMES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        # Norms that Transformer Engine fuses into the linear layer after them.
        (r"\.self_attention\.linear_qkv\.layer_norm_(weight|bias)$", r".input_layernorm.\1"),
        (r"\.mlp\.linear_fc1\.layer_norm_(weight|bias)$", r".pre_mlp_layernorm.\1"),
        (r"\.mixer\.in_proj\.layer_norm_(weight|bias)$", r".norm.\1"),
        (r"\.linear_(q|kv)_up_proj\.layer_norm_(weight|bias)$", r".\1_layernorm.\2"),
        # Experts.
        (r"\.experts\.experts\.(\d+)\.", r".experts.local_experts.\1."),
        (
            r"\.experts\.linear_fc([12])\.(weight|bias)(\d+)$",
            r".experts.local_experts.\3.linear_fc\1.\2",
        ),
    )
)
_OLD_STACKS = ("language_model.encoder.", "language_model.transformer.")
# Reverse rules for norms: the names in linear layers with a fused norm.
_INPUT, _MIXER, _MLP, _LATENT = (
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\.input_layernorm\.(weight|bias)$", r".self_attention.linear_qkv.layer_norm_\1"),
        (r"(\.layers\.\d+)\.norm\.(weight|bias)$", r"\1.mixer.in_proj.layer_norm_\2"),
        (r"\.pre_mlp_layernorm\.(weight|bias)$", r".mlp.linear_fc1.layer_norm_\1"),
        (r"\.(q|kv)_layernorm\.(weight|bias)$", r".linear_\1_up_proj.layer_norm_\2"),
    )
)
# End of our name -> dimension sharded by tensor parallelism; other tensors are not sharded.
_SHARDED_DIMS = (
    (re.compile(r"(^|\.)(word_embeddings|output_layer)\.(weight|bias)$"), 0),
    (re.compile(r"\.(linear_qkv|linear_q|linear_kv|linear_fc1|eh_proj)\.(weight|bias)$"), 0),
    (re.compile(r"\.linear_(q|q_up|kv_up)_proj\.(weight|bias)$"), 0),
    (re.compile(r"\.core_attention\.softmax_offset$"), 0),
    (re.compile(r"\.mixer\.(A_log|D|dt_bias|norm\.weight)$"), 0),
    (re.compile(r"\.(linear_proj|linear_fc2|mixer\.out_proj)\.weight$"), 1),
    # Adapters: B of a layer that shards its outputs, A of one that shards its inputs.
    (re.compile(r"(^|\.)(word_embeddings\.lora\.a|output_layer\.lora\.b)$"), 0),
    (re.compile(r"\.(linear_qkv|linear_q|linear_kv|linear_fc1)\.lora\.(\w+_)?b$"), 0),
    (re.compile(r"\.linear_(q|q_up|kv_up)_proj\.lora\.b$"), 0),
    (re.compile(r"\.(linear_proj|linear_fc2|mixer\.out_proj)\.lora\.a$"), 1),
)
_VOCABULARY = re.compile(
    r"(^|\.)((word_embeddings|output_layer)\.(weight|bias)|word_embeddings\.lora\.a|"
    r"output_layer\.lora\.b)$"
)
_GATED = re.compile(r"\.linear_fc1\.(weight|bias)$")
_GATED_FLAGS = ("swiglu", "geglu", "quick_geglu", "gated_linear_unit")
# End of a name -> blocks concatenated in it: gate, input, two projections, time steps.
_BLOCKS = {
    **dict.fromkeys((".mixer.in_proj.weight", ".mixer.in_proj.lora.b"), ("z", "x", "B", "C", "dt")),
    **dict.fromkeys((".mixer.conv1d.weight", ".mixer.conv1d.bias"), ("x", "B", "C")),
}
_NARROW = re.compile(r"\.linear_(q|kv)_down_proj\.(?!lora\.)")
_EXPERT = re.compile(r"^(.*\.experts)\.local_experts\.(\d+)\.(.*)$")
_BUFFER = re.compile(r"\.(expert_bias|quantizer\.amax_history)$")
_LAYER = re.compile(r"^(?!mtp\.)(.*\blayers)\.(\d+)\.(.*)$")
_STACK = re.compile(r"^(.*\blayers)\.(?!\d)(.*)$")
_STATE = re.compile(r"^(?:chained_\d+\.)?(optimizer\.state\.\w+?\.)?(.*)$")
OUTPUT = "output_layer.weight"


class Sharding(NamedTuple):
    """Tensor-parallel sharding: dimension (None: not sharded), and relative sizes of its blocks."""

    dim: int | None
    blocks: tuple[int, ...] = (1,)


def is_before_core(names: Iterable[str]) -> bool:
    """Return whether ``names`` of a model's tensors are those of a model before Megatron Core."""
    return any(name.startswith(_OLD_STACKS) for name in names)


def our_name(name: str, *, before_core: bool = False) -> str:
    """Return this project's name of a model tensor; ``before_core``: see `is_before_core`."""
    for pattern, replacement in (*(_BEFORE_CORE if before_core else ()), *_RENAMES):
        name = pattern.sub(replacement, name)
    return name


def fused_name(name: str, arguments: Arguments) -> str:
    """Return the Transformer Engine name of a tensor, from this project's ``name``.

    A norm before several matrices, or before a router, is not fused and keeps its name.
    """
    is_latent = bool(arguments.get("multi_latent_attention"))
    layer = split_layer(name)
    last = int(arguments.get("num_layers") or 1) - 1
    number = layer[1] if layer else last  # MTP: as the last layer
    rules = [_LATENT if is_latent else _INPUT, _MIXER]
    if not stored_layer_has_experts(number, arguments):
        rules.append(_MLP)
    for pattern, replacement in rules:
        name = pattern.sub(replacement, name)
    return name


def stored_layer_has_experts(layer: int, arguments: Arguments) -> bool:
    """Return whether layer ``layer`` (from 0) of a stored model has experts."""
    if is_hybrid(arguments):
        return str(arguments.get("hybrid_override_pattern") or "")[layer : layer + 1] == "E"
    freq = arguments.get("moe_layer_freq") or 1
    if not arguments.get("num_experts"):
        return False
    return layer % freq == 0 if isinstance(freq, int) else bool(freq[layer])


def is_hybrid(arguments: Arguments) -> bool:
    """Return whether the model is a Mamba or hybrid model, whose layers may differ in kind."""
    return arguments.get("model_kind") == "mamba"


def layers_are_alike(arguments: Arguments) -> bool:
    """Return whether Megatron-LM stacks the layers of such a model in `torch_dist`."""
    freq = arguments.get("moe_layer_freq") or 1
    is_mixed = is_hybrid(arguments) or (bool(arguments.get("num_experts")) and freq != 1)
    return not is_mixed and not arguments.get("heterogeneous_layers_config_path")


def sharding_of(name: str, arguments: Arguments) -> Sharding:
    """Return the tensor-parallel sharding of the tensor with our ``name``."""
    if _NARROW.search(name) and arguments.get("transformer_impl") == "local":
        return Sharding(0)
    if blocks := blocks_of(name, arguments):
        return Sharding(0, tuple(blocks.values()))
    for pattern, dim in _SHARDED_DIMS:
        if pattern.search(name):
            is_gated = _GATED.search(name) and any(map(arguments.get, _GATED_FLAGS))
            return Sharding(dim, (1, 1) if is_gated else (1,))
    return Sharding(None)


def blocks_of(name: str, arguments: Arguments) -> dict[str, int]:
    """Return name and number of rows of the blocks of a mixer tensor; empty for other tensors."""
    tail = next((tail for tail in _BLOCKS if name.endswith(tail)), None)
    if tail is None:
        return {}
    width, of_states = int(arguments["mamba_head_dim"]), int(arguments["mamba_num_groups"])
    of_states *= int(arguments["mamba_state_dim"])
    heads = int(arguments.get("mamba_num_heads") or 2 * int(arguments["hidden_size"]) // width)
    rows = {"z": heads * width, "x": heads * width, "B": of_states, "C": of_states, "dt": heads}
    return {block: rows[block] for block in _BLOCKS[tail]}


def split_block(name: str) -> tuple[str, str]:
    """Split the name of a mixer's block into tensor name and block (empty: complete tensor).

    >>> split_block("decoder.layers.0.mixer.in_proj.weight.dt")
    ('decoder.layers.0.mixer.in_proj.weight', 'dt')
    """
    whole, _, block = name.rpartition(".")
    is_one = any(whole.endswith(tail) and block in blocks for tail, blocks in _BLOCKS.items())
    return (whole, block) if is_one else (name, "")


def is_expert(name: str) -> bool:
    """Return whether a tensor belongs to one or several experts."""
    return ".experts." in name


def is_buffer(name: str) -> bool:
    """Return whether a model tensor is a buffer, which has no optimizer state."""
    return _BUFFER.search(name) is not None


def split_expert(name: str) -> tuple[str, int, str] | None:
    """Split into (``...mlp.experts``, global number, the rest); None for other tensors.

    >>> split_expert("decoder.layers.3.mlp.experts.local_experts.5.linear_fc1.weight")
    ('decoder.layers.3.mlp.experts', 5, 'linear_fc1.weight')
    """
    found = _EXPERT.match(name)
    return (found[1], int(found[2]), found[3]) if found else None


def is_vocabulary(name: str) -> bool:
    """Return whether the first dimension is the vocabulary, with padding at its end."""
    return _VOCABULARY.search(name) is not None


def split_layer(name: str) -> tuple[str, int, str] | None:
    """Split into (``decoder.layers``, number, the rest).

    Returns None for tensors outside the layers and for layers of multi-token prediction.

    >>> split_layer("decoder.layers.3.mlp.linear_fc1.weight")
    ('decoder.layers', 3, 'mlp.linear_fc1.weight')
    """
    found = _LAYER.match(name)
    return (found[1], int(found[2]), found[3]) if found else None


def split_stack(name: str) -> tuple[str, str] | None:
    """Split the name of a tensor stacked over layers: (``decoder.layers``, the rest); else None."""
    found = _STACK.match(name)
    return (found[1], found[2]) if found else None


def split_state(key: str) -> tuple[str, str]:
    """Split into (``optimizer.state.exp_avg.`` or empty, name of the parameter)."""
    found = _STATE.match(key)
    assert found is not None
    return found[1] or "", found[2]


_SHARED = "embedding.word_embeddings.weight"
_EMBEDDINGS = (
    _SHARED,
    "embedding.position_embeddings.weight",
    "embedding.tokentype_embeddings.weight",
    "encoder_relative_pos_emb.relative_attention_bias.weight",
    "decoder_relative_pos_emb.relative_attention_bias.weight",
)
_EXTRA_STATE = "_extra_state"


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
            yield from _present(
                stored, *(pair for norm in norms for pair in _weight_and_bias(norm))
            )
    if is_last:
        # MTP layers need one stage: with more, Megatron-LM also stores a copy of the embedding.
        for depth in range(int(arguments.get("mtp_num_layers") or 0) if is_first else 0):
            place = f"mtp.layers.{depth}."
            tails = _in_mtp_layer(int(arguments["num_layers"]) - 1, arguments, experts)
            yield from _of_layer(stored, arguments, (place, place), tails)
        yield from _present(
            stored, *_weight_and_bias("lm_head.dense"), *_weight_and_bias("lm_head.layer_norm")
        )
        yield from _present(stored, (OUTPUT, OUTPUT))
        if not is_first and OUTPUT not in stored:
            yield OUTPUT, _SHARED
        yield f"output_layer.{_EXTRA_STATE}", ""
        biases = "output_layer.bias", f"lm_head.{OUTPUT}", "lm_head.output_layer.bias"
        yield from _present(stored, *((name, name) for name in biases))
        yield from _present(
            stored, *_weight_and_bias("binary_head"), *_weight_and_bias("pooler.dense")
        )


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
            yield local, "" if there.endswith(_EXTRA_STATE) else name


def _is_fused(arguments: Arguments) -> bool:
    return arguments.get("transformer_impl") == "transformer_engine"


def _in_mtp_layer(
    number: int, arguments: Arguments, experts: Sequence[int]
) -> Iterator[tuple[str, str]]:
    yield from (*_weight_and_bias("enorm"), *_weight_and_bias("hnorm"), *_matrix("eh_proj"))
    for there, ours in _in_layer(number, arguments, experts):
        yield f"transformer_layer.{there}", f"transformer_layer.{ours}"
    yield from _weight_and_bias("final_layernorm")


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
    first, projection = _weight_and_bias("input_layernorm"), _matrix("self_attention.linear_proj")
    is_inside = is_fused and not is_latent  # the norm is fused into the following matrix
    yield from (*projection, *first) if is_inside else (*first, *projection)
    for part in _latent_attention(is_fused) if is_latent else _ATTENTION:
        kind = _weight_and_bias if part.endswith("norm") else _matrix
        yield from kind(f"self_attention.{part}")
    yield from _weight_and_bias("pre_cross_attn_layernorm")
    for part in ("proj", "q", "kv"):
        yield from _matrix(f"cross_attention.linear_{part}")
    yield from _weight_and_bias("pre_mlp_layernorm")
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
    norm, inside = _weight_and_bias("norm"), _weight_and_bias("mixer.conv1d")
    first = (*norm, *_matrix("mixer.in_proj")) if is_fused else _matrix("mixer.in_proj")
    yield from (*first, *inside, *_weight_and_bias("mixer.norm"), *_matrix("mixer.out_proj"))
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
            yield f"mlp.experts.{matrix}.{_EXTRA_STATE}", first


def _weight_and_bias(name: str) -> tuple[tuple[str, str], ...]:
    return tuple((f"{name}.{kind}",) * 2 for kind in ("weight", "bias"))


def _matrix(name: str) -> tuple[tuple[str, str], ...]:
    weight, bias = f"{name}.weight", f"{name}.bias"
    return (weight, weight), (bias, bias), (f"{name}.{_EXTRA_STATE}", weight)

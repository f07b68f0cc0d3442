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
from functools import partial
from typing import NamedTuple

from megatron.core.config.errors import CheckpointError
from megatron.core.config.value_types import Arguments, Shape
from megatron.core.dist_checkpointing.key_names import (
    HALVES,
    MIXER_BLOCKS,
    VOCABULARY,
    with_fused_norms,
)

# Pattern of a part of a name -> this project's name; all rules are applied, in order.
_BEFORE_CORE = (
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
_RENAMES = (
    # Norms that Transformer Engine fuses into the linear layer after them.
    (r"\.self_attention\.linear_qkv\.layer_norm_(weight|bias)$", r".input_layernorm.\1"),
    (r"\.mlp\.linear_fc1\.layer_norm_(weight|bias)$", r".pre_mlp_layernorm.\1"),
    (r"\.self_attention\.in_proj\.layer_norm_(weight|bias)$", r".input_layernorm.\1"),
    (r"\.mixer\.in_proj\.layer_norm_(weight|bias)$", r".norm.\1"),
    (r"\.linear_(q|kv)_up_proj\.layer_norm_(weight|bias)$", r".\1_layernorm.\2"),
    # Experts.
    (r"\.experts\.experts\.(\d+)\.", r".experts.local_experts.\1."),
    (
        r"\.experts\.linear_fc([12])\.(weight|bias)(\d+)$",
        r".experts.local_experts.\3.linear_fc\1.\2",
    ),
)
_OLD_STACKS = ("language_model.encoder.", "language_model.transformer.")
# Ends of our names that tensor parallelism shards, by dimension; other tensors are not sharded.
# Adapters: B of a layer that shards its outputs, A of one that shards its inputs.
_SHARDED_DIMS = (
    VOCABULARY + r"|\.(linear_qkv|linear_q|linear_kv|linear_fc1|eh_proj)\.(weight|bias)$"
    r"|\.(linear_qkv|linear_q|linear_kv|linear_fc1)\.lora\.(\w+_)?[bm]$"
    r"|\.linear_(q|q_up|kv_up)_proj\.(weight|bias|lora\.[bm])$"
    r"|\.core_attention\.softmax_offset$"
    r"|\.mixer\.(A_log|D|dt_bias|norm\.weight)$"
    r"|\.self_attention\.(A_log|dt_bias)$",
    r"\.(linear_proj|linear_fc2|out_proj)\.(weight|lora\.a)$",
)
_GATED = re.compile(r"\.linear_fc1\.(weight|bias)$")
_GATED_FLAGS = ("swiglu", "geglu", "quick_geglu", "gated_linear_unit")
_NARROW = re.compile(r"\.linear_(q|kv)_down_proj\.(?!lora\.)")
_EXPERT = re.compile(r"^(.*\.experts)\.local_experts\.(\d+)\.(.*)$")
_BUFFER = re.compile(r"\.(expert_bias|tid2eid|quantizer\.\w+)$")
_LAYER = re.compile(r"^(?!mtp\.)(.*\blayers)\.(\d+)\.(.*)$")
_LAYER_AHEAD = re.compile(r"^(mtp\..*\.mtp_model_layer\.layers)\.(\d+)\.(.*)$")
_STACK = re.compile(r"^(.*\blayers)\.(?!\d)(.*)$")
_STATE = re.compile(r"^(?:chained_\d+\.)?(optimizer\.state\.\w+?\.)?(.*)$")
OUTPUT = "output_layer.weight"


class Sharding(NamedTuple):
    """Tensor-parallel sharding: dimension (None: not sharded), and relative sizes of its blocks."""

    dim: int | None
    blocks: Shape = (1,)


def is_before_core(names: Iterable[str]) -> bool:
    """Return whether ``names`` of a model's tensors are those of a model before Megatron Core."""
    return any(name.startswith(_OLD_STACKS) for name in names)


def our_name(name: str, *, before_core: bool = False) -> str:
    """Return this project's name of a model tensor; ``before_core``: see `is_before_core`."""
    for pattern, replacement in (*(_BEFORE_CORE if before_core else ()), *_RENAMES):
        name = re.sub(pattern, replacement, name)
    return name


def fused_name(name: str, arguments: Arguments) -> str:
    """Return the Transformer Engine name of a tensor, from this project's ``name``.

    A norm before several matrices, or before a router, is not fused and keeps its name.
    """
    layer = split_layer(name) or _split_number(_LAYER_AHEAD, name)
    num_layers = int(arguments.get("num_layers") or 1)
    number = layer[1] if layer else num_layers - 1  # MTP: as the last layer
    if name.startswith("mtp.") and layer:
        number += num_layers
    return with_fused_norms(
        name,
        is_latent=bool(arguments.get("multi_latent_attention")),
        has_experts=stored_layer_has_experts(number, arguments),
        is_linear=_is_linear(number, arguments),
    )


def stored_layer_has_experts(layer: int, arguments: Arguments) -> bool:
    """Return whether layer ``layer`` (from 0) of a stored model has experts.

    The layers of each MTP depth of a hybrid follow its others.
    """
    if is_hybrid(arguments):
        pattern = str(arguments.get("hybrid_override_pattern") or "")
        pattern += str(arguments.get("mtp_hybrid_override_pattern") or "")
        return pattern[layer : layer + 1] == "E"
    freq = arguments.get("moe_layer_freq") or 1
    if not arguments.get("num_experts"):
        return False
    return layer % freq == 0 if isinstance(freq, int) else bool(freq[layer])


def _is_linear(layer: int, arguments: Arguments) -> bool:
    """Return whether layer ``layer`` (from 0) of a stored model has linear attention."""
    if arguments.get("experimental_attention_variant") in (None, "dsa"):
        return False
    freq = arguments.get("linear_attention_freq")
    return freq is None or bool((layer + 1) % freq if isinstance(freq, int) else freq[layer])


def is_hybrid(arguments: Arguments) -> bool:
    """Return whether the model is a Mamba or hybrid model, whose layers may differ in kind."""
    return arguments.get("model_kind") == "mamba"


def layers_are_alike(arguments: Arguments) -> bool:
    """Return whether Megatron-LM stacks the layers of such a model in `torch_dist`."""
    freq = arguments.get("moe_layer_freq") or 1
    is_mixed = is_hybrid(arguments) or (bool(arguments.get("num_experts")) and freq != 1)
    is_mixed |= arguments.get("experimental_attention_variant") not in (None, "dsa")
    is_mixed |= int(arguments.get("dsa_indexer_topk_freq") or 1) > 1
    is_mixed |= bool(arguments.get("moe_num_hash_layers"))
    return not is_mixed and not arguments.get("heterogeneous_layers_config_path")


def sharding_of(name: str, arguments: Arguments) -> Sharding:
    """Return the tensor-parallel sharding of the tensor with our ``name``."""
    if _NARROW.search(name) and arguments.get("transformer_impl") == "local":
        return Sharding(0)
    if blocks := blocks_of(name, arguments):
        return Sharding(0, tuple(blocks.values()))
    for dim, pattern in enumerate(_SHARDED_DIMS):
        if re.search(pattern, name):
            is_gated = _GATED.search(name) and any(map(arguments.get, _GATED_FLAGS))
            return Sharding(dim, (1, 1) if is_gated else (1,))
    return Sharding(None)


def blocks_of(name: str, arguments: Arguments) -> dict[str, int]:
    """Return name and number of rows of the blocks of a mixer tensor; empty for other tensors."""
    tail = next((tail for tail in MIXER_BLOCKS if name.endswith(tail)), None)
    if tail is None:
        return {}
    if tail.startswith(".self_attention"):
        key, value = (
            [int(arguments[f"linear_{name}"]) for name in (f"num_{kind}_heads", f"{kind}_head_dim")]
            for kind in ("key", "value")
        )
        rows = dict.fromkeys(("query", "key"), key[0] * key[1])
        rows |= dict.fromkeys(("value", "z"), value[0] * value[1])
        rows |= dict.fromkeys(("beta", "alpha"), value[0])
        return {block: rows[block] for block in MIXER_BLOCKS[tail]}
    width, of_states = int(arguments["mamba_head_dim"]), int(arguments["mamba_num_groups"])
    of_states *= int(arguments["mamba_state_dim"])
    heads = int(arguments.get("mamba_num_heads") or 2 * int(arguments["hidden_size"]) // width)
    rows = {"z": heads * width, "x": heads * width, "B": of_states, "C": of_states, "dt": heads}
    return {block: rows[block] for block in MIXER_BLOCKS[tail]}


def split_block(name: str) -> tuple[str, str]:
    """Split the name of a mixer's block into tensor name and block (empty: complete tensor).

    >>> split_block("decoder.layers.0.mixer.in_proj.weight.dt")
    ('decoder.layers.0.mixer.in_proj.weight', 'dt')
    """
    whole, _, block = name.rpartition(".")
    is_one = any(whole.endswith(tail) and block in blocks for tail, blocks in MIXER_BLOCKS.items())
    return (whole, block) if is_one else (name, "")


def split_half(name: str) -> tuple[str, int | None]:
    """Split a suffix of `HALVES` from a name: the name, and the index of the half or None."""
    return (name[:-2], HALVES.index(name[-2:])) if name.endswith(HALVES) else (name, None)


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
    return _split_number(_EXPERT, name)


def _split_number(pattern: re.Pattern[str], name: str) -> tuple[str, int, str] | None:
    found = pattern.match(name)
    return (found[1], int(found[2]), found[3]) if found else None


def split_layer(name: str) -> tuple[str, int, str] | None:
    """Split into (``decoder.layers``, number, the rest).

    Returns None for tensors outside the layers and for layers of multi-token prediction.

    >>> split_layer("decoder.layers.3.mlp.linear_fc1.weight")
    ('decoder.layers', 3, 'mlp.linear_fc1.weight')
    """
    return _split_number(_LAYER, name)


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
    "embedding.word_embeddings",
    "embedding.position_embeddings",
    "embedding.tokentype_embeddings",
    "encoder_relative_pos_emb.relative_attention_bias",
    "decoder_relative_pos_emb.relative_attention_bias",
)
_EXTRA_STATE = "_extra_state"
_MATRIX = re.compile(r"\b(linear_\w+|\w+_proj)$")  # modules with an entry `_extra_state`
Names = Iterator[tuple[str, str]]  # (name in a file, our name)
# Modules, whose weight and bias are meant, and parameters; as a pair if the names differ.
_Parts = Iterable[str | tuple[str, str]]


def ordered_names(
    stored: Collection[str],
    arguments: Arguments,
    *,
    layers: Sequence[int] | None = None,
    experts: Sequence[int] | None = None,
    is_first: bool = True,
    is_last: bool = True,
) -> Names:
    """Yield (name in a file, our name) of the tensors of a model chunk, in the order of the model.

    ``layers``, ``experts``: layer numbers of the chunk, expert numbers of the rank; None for all.
    Our name is empty for an ``_extra_state`` entry, which has no tensor.
    """
    if layers is None:
        layers = sorted({layer[1] for layer in map(split_layer, stored) if layer})
    if experts is None:
        experts = range(int(arguments.get("num_experts") or 0))
    named = partial(_stored_names, stored, arguments)
    if is_first:
        yield from named(_EMBEDDINGS)
    for stack in ("encoder", "decoder"):
        for local, number in enumerate(layers):
            parts = [*_in_layer(number, arguments, experts), *_CONNECTIONS]
            yield from named(parts, f"{stack}.layers.{number}.", f"{stack}.layers.{local}.")
        if is_last:
            joined = ["hyper_head", "hyper_head.scale", "final_layernorm", "final_norm"]
            yield from named(joined, f"{stack}.")
    if is_last:
        # MTP layers need one stage: with more, Megatron-LM also stores a copy of the embedding.
        for depth in range(int(arguments.get("mtp_num_layers") or 0) if is_first else 0):
            place = f"mtp.layers.{depth}."
            num_layers = int(arguments["num_layers"])
            parts = [*_in_layer(num_layers - 1, arguments, experts)]
            yield from named(["enorm", "hnorm", "eh_proj"], place)
            yield from named(parts, f"{place}transformer_layer.")
            for i in range(len(arguments.get("mtp_hybrid_override_pattern") or "")):
                parts = [*_in_layer(num_layers + i, arguments, experts)]
                yield from named(parts, f"{place}mtp_model_layer.layers.{i}.")
            yield from named(["final_layernorm"], place)
        yield from named(["lm_head.dense", "lm_head.layer_norm", OUTPUT])
        if not is_first and OUTPUT not in stored:
            yield OUTPUT, _SHARED
        yield f"output_layer.{_EXTRA_STATE}", ""
        yield from named(["output_layer.bias", "lm_head.output_layer", "binary_head"])
        yield from named(["pooler.dense"])


def stage_names(
    stored: Collection[str],
    arguments: Arguments,
    stage: int,
    *,
    experts: Sequence[int] | None,
    layers: Sequence[Sequence[int]] | None = None,
) -> Names:
    """Yield the `ordered_names` of a virtual pipeline stage.

    ``layers``: the layers of each stage; None if all have equally many.  Raises CheckpointError if
    they cannot.
    """
    stages = int(arguments.get("pipeline_model_parallel_size") or 1)
    stages *= int(arguments.get("virtual_pipeline_model_parallel_size") or 1)
    mine = None
    if stages > 1 and layers:
        mine = layers[stage]
    elif stages > 1:
        count = len({layer[1] for layer in map(split_layer, stored) if layer})
        if count % stages:
            raise CheckpointError(f"{count} layers cannot be split over {stages} stages")
        size = count // stages
        mine = range(stage * size, (stage + 1) * size)
    yield from ordered_names(
        stored,
        arguments,
        layers=mine,
        experts=experts,
        is_first=stage == 0,
        is_last=stage == stages - 1,
    )


def _stored_names(
    stored: Collection[str],
    arguments: Arguments,
    parts: _Parts,
    place: str = "",
    place_in_file: str | None = None,
) -> Names:
    """Yield the names of the stored tensors of ``parts``, which are in the module ``place``."""
    for part in parts:
        there, ours = (part, part) if isinstance(part, str) else part
        ends = [("", ""), (".weight", ".weight"), (".bias", ".bias")]
        if _MATRIX.search(ours):
            ends.append((f".{_EXTRA_STATE}", ".weight"))
        for end, our_end in ends:
            name = place + ours + our_end
            if name in stored:
                local = place + there + end
                if _is_fused(arguments):
                    local = fused_name(local, arguments)
                if place_in_file is not None:
                    local = place_in_file + local.removeprefix(place)
                yield local, "" if local.endswith(_EXTRA_STATE) else name


def _is_fused(arguments: Arguments) -> bool:
    return arguments.get("transformer_impl") == "transformer_engine"


def _in_layer(
    number: int, arguments: Arguments, experts: Sequence[int]
) -> Iterator[str | tuple[str, str]]:
    """Yield the parts of a layer: those of all kinds of layers, of which few are stored."""
    is_fused = _is_fused(arguments)
    is_latent = bool(arguments.get("multi_latent_attention"))
    yield from ("mixer.dt_bias", "mixer.A_log", "mixer.D")
    mixer = ["mixer.in_proj", "mixer.conv1d", "mixer.norm", "mixer.out_proj"]
    yield from ["norm", *mixer] if is_fused else [*mixer, "norm"]
    yield from ("self_attention.dt_bias", "self_attention.A_log")
    linear = [f"self_attention.{part}" for part in ("in_proj", "conv1d", "out_norm", "out_proj")]
    first = ["input_layernorm", "self_attention.linear_proj"]
    if _is_linear(number, arguments):
        yield from ["input_layernorm", *linear] if is_fused else [*linear, "input_layernorm"]
        first = []  # once: parameters of the optimizer are counted
    yield "self_attention.core_attention.softmax_offset"
    indexer = "self_attention.core_attention.indexer"
    yield from (f"{indexer}.{part}" for part in _INDEXER)
    # A norm that is fused into the following matrix comes with it.
    yield from reversed(first) if is_fused and not is_latent else first
    yield from (f"self_attention.{part}" for part in _ATTENTION[is_latent, is_latent and is_fused])
    yield "pre_cross_attn_layernorm"
    yield from (f"cross_attention.linear_{part}" for part in ("proj", "q", "kv"))
    yield "pre_mlp_layernorm"
    if not stored_layer_has_experts(number, arguments):
        yield from ("mlp.linear_fc1", "mlp.linear_fc2")
        return
    yield from ("mlp.router", "mlp.router.expert_bias", "mlp.router.tid2eid")
    yield from ("mlp.fc1_latent_proj", "mlp.fc2_latent_proj")
    if is_fused and arguments.get("moe_grouped_gemm"):
        for matrix in ("linear_fc1", "linear_fc2"):
            of_first = ""
            for kind in ("weight", "bias"):
                for local, expert in enumerate(experts):
                    ours = f"mlp.experts.local_experts.{expert}.{matrix}.{kind}"
                    of_first = of_first or ours
                    yield f"mlp.experts.{matrix}.{kind}{local}", ours
            yield f"mlp.experts.{matrix}.{_EXTRA_STATE}", of_first
    else:
        for local, expert in enumerate(experts):
            for matrix in ("linear_fc1", "linear_fc2"):
                place = "mlp.experts.local_experts"
                yield f"{place}.{local}.{matrix}", f"{place}.{expert}.{matrix}"
    yield "mlp.shared_experts.gate_weight"
    yield from ("mlp.shared_experts.linear_fc1", "mlp.shared_experts.linear_fc2")


_INDEXER = ("linear_wq_b", "linear_wk", "linear_weights_proj", "k_norm")
_CONNECTIONS = tuple(
    f"{part}_hyper_connection{end}" for part in ("self_attention", "mlp") for end in ("", ".scale")
)
# (latent, fused) -> the parts of attention, in order; a fused norm precedes its matrix.
_ATTENTION = {
    (False, False): "linear_qkv q_layernorm k_layernorm".split(),
    (True, False): (
        "linear_q_proj linear_q_down_proj linear_q_up_proj linear_kv_down_proj linear_kv_up_proj "
        "q_layernorm kv_layernorm"
    ).split(),
    (True, True): (
        "linear_q_proj linear_q_down_proj q_layernorm linear_q_up_proj linear_kv_down_proj "
        "kv_layernorm linear_kv_up_proj"
    ).split(),
}

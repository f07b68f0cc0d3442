"""Checks of context parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from megatron.core.parallel.context_parallel_partition import sequence_divisor
from megatron.core.transformer.context_parallel import COMM_TYPES
from megatron.training.config.run import RunConfig


def sequence_fits_context_parallel(run: RunConfig) -> Iterator[str]:
    """Require a sequence length that splits into two chunks per context-parallel rank.

    Sequence parallelism additionally splits the tokens of a rank over the tensor-parallel ranks.
    """
    seq, m = run.data.seq_length, run.model
    cp, tp = m.context_parallel_size, m.tensor_model_parallel_size
    if cp <= 1 or tp < 1:
        return
    needed = sequence_divisor(cp=cp, tp=tp, sequence_parallel=m.sequence_parallel)
    if seq % (2 * cp):
        yield (
            f"--seq-length {seq} is not a multiple of 2 x --context-parallel-size {cp} = "
            f"{2 * cp}: use a multiple of {2 * cp}"
        )
    elif seq % needed:
        yield (
            f"--seq-length {seq} leaves {seq // cp} tokens to each of --context-parallel-size "
            f"{cp} ranks, which --sequence-parallel cannot divide by --tensor-model-parallel-size "
            f"{tp}: use a multiple of {needed}"
        )


def context_levels_multiply(run: RunConfig) -> Iterator[str]:
    """Require two hierarchical sizes (all-to-all, ring) whose product is the CP size."""
    levels, cp = run.model.hierarchical_context_parallel_sizes, run.model.context_parallel_size
    if levels is None:
        if cp > 1 and "a2a+p2p" in run.model.cp_comm_type:
            yield (
                "--cp-comm-type a2a+p2p needs --hierarchical-context-parallel-sizes: the "
                f"all-to-all size and the ring size, whose product is {cp}"
            )
        return
    product = " x ".join(str(n) for n in levels)
    if len(levels) != 2:
        yield (
            f"--hierarchical-context-parallel-sizes {product}: give two sizes, of the "
            "all-to-all and of the ring"
        )
    elif prod(levels) != cp:
        yield (
            f"--hierarchical-context-parallel-sizes {product} = {prod(levels)} differs from "
            f"--context-parallel-size {cp}: give two sizes whose product is {cp}"
        )


def exchange_types_are_known(run: RunConfig) -> Iterator[str]:
    """Require known communication types, one for all layers or one per layer."""
    types, layers = run.model.cp_comm_type, run.model.num_layers
    for kind in dict.fromkeys(types):
        if kind not in COMM_TYPES:
            yield f"--cp-comm-type {kind}: use one of {', '.join(COMM_TYPES)}"
    if len(types) not in (1, layers):
        yield (
            f"--cp-comm-type has {len(types)} entries and --num-layers is {layers}: give one for "
            "all layers, or one for each"
        )


def heads_fit_the_exchange(run: RunConfig) -> Iterator[str]:
    """Require that the heads split evenly over the ranks of an all-to-all.

    Key/value heads are repeated to fit, so only query heads matter.
    """
    m = run.model
    tp, cp = m.tensor_model_parallel_size, m.context_parallel_size
    levels = m.hierarchical_context_parallel_sizes or (cp,)
    if cp <= 1 or tp < 1 or m.num_attention_heads % tp:
        return
    heads = m.num_attention_heads // tp
    for kind, traders in (("a2a", cp), ("a2a+p2p", levels[0])):
        if kind in m.cp_comm_type and traders >= 1 and heads % traders:
            yield (
                f"--cp-comm-type {kind} cannot split {heads} heads (--num-attention-heads "
                f"{m.num_attention_heads} over --tensor-model-parallel-size {tp}) over {traders} "
                "ranks: use p2p or allgather, or a2a+p2p with a first "
                "--hierarchical-context-parallel-sizes that divides them"
            )

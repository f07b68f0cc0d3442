"""Attention over ranks that share a sequence has the values and gradients of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.enums import AttnBackend, AttnMaskType
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parallel.context_parallel_partition import held_tokens
from megatron.core.parallel.process_groups_config import create_process_groups, make_grids
from megatron.core.tensor_parallel.random import model_parallel_seed
from megatron.core.transformer import context_parallel
from megatron.core.transformer.attention_masks import alibi_bias, alibi_slopes
from megatron.core.transformer.dot_product_attention import DotProductAttention
from tests.support import tolerances
from tests.support.one_process import tiny_config
from tests.support.ranks import run_ranks

S, N, D = 32, 4, 8
TYPES = ("p2p", "a2a", "allgather", "a2a+p2p")
LENGTHS = (8, 16, 8)

# name -> config, query groups, what is handed over beside queries, keys and values
CASES: dict[str, tuple[dict[str, Any], int, tuple[str, ...]]] = {
    "causal": ({}, 4, ()),
    "kernel": ({"attention_backend": AttnBackend.flash}, 2, ()),
    "grouped": ({"attention_backend": AttnBackend.unfused}, 2, ()),
    "multi_query": ({}, 1, ()),
    "both_ways": ({}, 2, ("no_mask",)),
    "packed": ({"attention_backend": AttnBackend.unfused}, 2, ("packed",)),
    "packed_kernel": ({}, 2, ("packed",)),
    "packed_both_ways": ({}, 2, ("packed", "no_mask")),
    "window": ({"window_size": (5, 0)}, 2, ()),
    "packed_with_padding": ({}, 2, ("packed", "padding")),
    "packed_with_padding_both_ways": ({}, 2, ("packed", "padding", "no_mask")),
    "packed_window": ({"window_size": (5, 0)}, 2, ("packed",)),
    "window_both_ways": ({"window_size": (5, 3)}, 2, ("no_mask",)),
    "softcap": ({"attn_logit_softcapping": 0.5}, 2, ()),
    "alibi": ({}, 2, ("alibi",)),
    "mask": ({}, 2, ("mask",)),
    "mask_of_keys": ({}, 2, ("mask_of_keys", "no_mask")),
    "sink": ({"softmax_type": "learnable", "params_dtype": torch.float64}, 2, ()),
    "sink_window": (
        {"softmax_type": "learnable", "params_dtype": torch.float64, "window_size": (5, 0)},
        2,
        (),
    ),
    "off_by_one_packed": ({"softmax_type": "off-by-one"}, 1, ("packed",)),
    "packed_alibi_softcap": ({"attn_logit_softcapping": 0.5}, 2, ("packed", "alibi")),
}


def inputs(groups: int, num_sequences: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(S, num_sequences, heads, D, generator=generator, dtype=torch.float64)
        for heads in (N, groups, groups)
    ]


def call_with(asked: tuple[str, ...], queries: Tensor) -> dict[str, Any]:
    """Arguments of the core for queries at given places."""
    call: dict[str, Any] = {}
    if "no_mask" in asked:
        call["attn_mask_type"] = AttnMaskType.no_mask
    if "packed" in asked:
        ends = torch.tensor([0, *LENGTHS]).cumsum(0).int()
        packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends)
        if "padding" in asked:
            packed.cu_seqlens_q_padded = ends
            packed.cu_seqlens_q = torch.tensor([0, 5, 21, 24]).int()
        call["packed_seq_params"] = packed
    if "alibi" in asked:
        call["attention_bias"] = alibi_bias(alibi_slopes(N), queries, S)
    if "mask" in asked:  # two documents, which end elsewhere in each sequence
        ends = torch.tensor([[11], [20]])
        document = torch.arange(S) >= ends
        call["attention_mask"] = (document[:, queries, None] != document[:, None])[:, None]
    if "mask_of_keys" in asked:
        call["attention_mask"] = (torch.arange(S) >= 27)[None, None, None]
    return call


def run_case(
    case: str, core_options: dict[str, Any], held: Tensor, **changes: Any
) -> tuple[Tensor, ...]:
    """Output, and gradients of q, k and v, of the held tokens; the gradient of a sink."""
    config, groups, asked = CASES[case]
    core = DotProductAttention(tiny_config(**config, **changes), layer_number=2, **core_options)
    sink = core.softmax_offset
    if sink is not None:
        torch.nn.init.constant_(sink, 0.5)
        sink.data[1] = 2.0
    q, k, v = (x[held].requires_grad_() for x in inputs(groups, 1 if "packed" in asked else 2))
    out = core(q, k, v, **call_with(asked, held))
    weight = torch.linspace(-1, 1, S, dtype=torch.float64)[held, None, None]
    (out.square() * weight).sum().backward()
    grad_sink = () if sink is None else (sink.grad,)
    return out.detach(), q.grad, k.grad, v.grad, *grad_sink


def held_by(case: str, rank: int, size: int) -> Tensor:
    lengths = LENGTHS if "packed" in CASES[case][2] else (S,)
    return held_tokens(lengths, rank, size)


def on_ranks(rank: int, size: int) -> dict[tuple[str, str], tuple[Tensor, ...]]:
    context_parallel._QUERIES = 3  # so that a window is worked on in parts
    levels = (2, size // 2)
    groups = create_process_groups(*make_grids(size, cp=size), context_levels=levels)
    return {
        (kind, case): run_case(
            case, {"pg_collection": groups}, held_by(case, rank, size), cp_comm_type=(kind,)
        )
        for kind in TYPES
        for case in CASES
    }


@pytest.mark.feature(
    "Context parallelism: ring, all-to-all, all-gather and two levels have the values and "
    "gradients of one process, to 1e-12"
)
@pytest.mark.parametrize("size", [2, 4])
def test_each_exchange_is_the_attention_of_one_process(size: int) -> None:
    ranks = run_ranks(on_ranks, size)
    for case in CASES:
        expected = run_case(case, {}, torch.arange(S))
        for kind in TYPES:
            for part, whole in enumerate(expected):
                found = torch.full_like(whole, float("nan"))
                for rank, results in enumerate(ranks):
                    if part < 4:
                        found[held_by(case, rank, size)] = results[kind, case][part]
                if part == 4:  # of a sink: a term on each rank
                    found = sum(results[kind, case][part] for results in ranks)
                torch.testing.assert_close(
                    found,
                    whole,
                    **tolerances.of(torch.float64),
                    msg=lambda m, at=(kind, case, part): f"{at}: {m}",
                )


def with_dropout(rank: int, size: int, kind: str) -> tuple[float, ...]:
    """The loss, its derivative by v along v, by q and k along themselves twice; without dropout."""
    groups = create_process_groups(*make_grids(size, cp=size))
    config = tiny_config(attention_dropout=0.3, cp_comm_type=(kind,))
    core = DotProductAttention(config, layer_number=1, pg_collection=groups)
    held = held_tokens((S,), rank, size)
    weight = torch.linspace(-1, 1, S, dtype=torch.float64)[held, None, None]

    def loss(*qkv: Tensor) -> Tensor:
        model_parallel_seed(1, tp_rank=0, cp_rank=rank)
        return (core(*qkv) * weight).sum()

    q, k, v = (x[held].requires_grad_() for x in inputs(2, 2))
    value = loss(q, k, v)
    value.backward()
    step = 1e-5
    with torch.no_grad():
        ahead = loss(q * (1 + step), k * (1 + 2 * step), v)
        behind = loss(q * (1 - step), k * (1 - 2 * step), v)
    along = (q.grad * q).sum() + 2 * (k.grad * k).sum()
    core.eval()
    with torch.no_grad():
        undropped = loss(q, k, v)
    numbers = (value, (v.grad * v).sum(), along, (ahead - behind) / (2 * step), undropped)
    return tuple(float(x.detach()) for x in numbers)


@pytest.mark.parametrize("kind", ["p2p", "a2a", "allgather"])
def test_dropped_probabilities_have_the_gradient_of_what_was_kept(kind: str) -> None:
    totals = torch.tensor(run_ranks(with_dropout, 2, kind), dtype=torch.float64).sum(0)
    value, along_v, along_qk, difference, undropped = totals
    assert 0.1 < abs(value - undropped) < abs(undropped) * 10
    torch.testing.assert_close(along_v, value, **tolerances.of(torch.float64))
    assert abs(along_qk) > 0.1
    torch.testing.assert_close(along_qk, difference, rtol=1e-6, atol=1e-6)

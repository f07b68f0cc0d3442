"""Private operations of torch that run on a GPU only: releases may change their arguments.

The names and their order are those of torch 2.11 and 2.13.  An argument that a release appends has
a default, and changes nothing for callers.
"""

from __future__ import annotations

import importlib
import inspect

import pytest
import torch
import torch.nn.functional as F

_QKV = "query key value"
_FLASH = "cum_seq_q cum_seq_k max_q max_k dropout_p is_causal"
_WINDOW = "scale window_size_left window_size_right"
_ARGUMENTS = {
    "_flash_attention_forward": f"{_QKV} {_FLASH} return_debug_mask {_WINDOW}",
    "_flash_attention_backward": (
        f"grad_out {_QKV} out logsumexp {_FLASH} rng_state unused {_WINDOW}"
    ),
    "_scaled_dot_product_cudnn_attention": (
        f"{_QKV} attn_bias compute_log_sumexp dropout_p is_causal return_debug_mask scale"
    ),
    "_scaled_mm": "self mat2 scale_a scale_b bias scale_result out_dtype use_fast_accum",
    "_scaled_mm_v2": (
        "self mat2 scale_a recipe_a swizzle_a scale_b recipe_b swizzle_b bias out_dtype "
        "contraction_dim use_fast_accum"
    ),
    "_fused_adamw_": (
        "self grads exp_avgs exp_avg_sqs max_exp_avg_sqs state_steps lr beta1 beta2 weight_decay "
        "eps amsgrad maximize grad_scale found_inf"
    ),
    "_softmax_backward_data": "grad_output output dim input_dtype",
}
_RESULTS = {
    "_flash_attention_forward": 5,  # output, log-sum-exp, state of dropout (2), debug mask
    "_flash_attention_backward": 3,
    "_scaled_dot_product_cudnn_attention": 9,
}


@pytest.mark.parametrize("name", _ARGUMENTS)
def test_the_arguments_of_a_private_operation_are_those_that_are_passed(name: str) -> None:
    schema = getattr(torch.ops.aten, name).default._schema
    expected = _ARGUMENTS[name].split()
    assert [a.name for a in schema.arguments[: len(expected)]] == expected
    assert all(a.has_default_value() for a in schema.arguments[len(expected) :])
    assert len(schema.returns) == _RESULTS.get(name, len(schema.returns))


def test_fused_collectives_have_the_arguments_that_are_passed() -> None:
    importlib.import_module("torch.distributed._symmetric_memory")  # registers the operations
    expected = {
        "fused_all_gather_matmul": "A Bs gather_dim group_name",
        "fused_matmul_reduce_scatter": "A B reduce_op scatter_dim group_name",
    }
    for name, arguments in expected.items():
        found = [a.name for a in getattr(torch.ops.symm_mem, name).default._schema.arguments]
        assert found[: len(arguments.split())] == arguments.split(), name


def test_an_addmm_of_16_bits_can_write_float32() -> None:
    schema = torch.ops.aten.addmm.dtype_out._schema
    expected = ["self", "mat1", "mat2", "out_dtype", "beta", "alpha", "out"]
    assert [a.name for a in schema.arguments] == expected


def test_a_grouped_gemm_takes_the_ends_of_its_groups() -> None:
    assert list(inspect.signature(F.grouped_mm).parameters)[:3] == ["mat_a", "mat_b", "offs"]


@pytest.mark.parametrize(
    ("bounds", "shape"), [(None, (2, 4, 24)), (torch.tensor([0, 24]).int(), (4, 24))]
)
def test_flash_attention_returns_a_log_sum_exp_of_heads_and_queries(
    bounds: torch.Tensor | None, shape: tuple[int, ...]
) -> None:
    where = torch.device("meta")
    tokens = (2, 24) if bounds is None else (24,)
    q = torch.empty(*tokens, 4, 16, device=where, dtype=torch.bfloat16)
    ends = None if bounds is None else bounds.to(where)
    out, lse, state, *_ = torch.ops.aten._flash_attention_forward(
        *(q, q, q, ends, ends, 24, 24, 0.0, True, False),
        scale=1.0,
        window_size_left=-1,
        window_size_right=0,
    )
    assert out.shape == q.shape
    assert lse.shape == shape
    assert lse.dtype == torch.float32
    assert (state.dtype, state.shape) == (torch.uint64, (2,))

"""The attention core: every implementation gives the formula's values and gradients."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.enums import AttnBackend, AttnMaskType
from megatron.core.packed_seq_params import PackedBounds, PackedSeqParams
from megatron.core.transformer import attention_blocks, context_parallel, dot_product_attention
from megatron.core.transformer.attention_backends import (
    AttentionRequest,
    OnlyKernels,
    attention_report,
    choose,
    fallback_warning,
    refusal,
)
from megatron.core.transformer.attention_masks import (
    VisibleKeys,
    alibi_bias,
    alibi_slopes,
    band,
    is_causal_mask,
    visible_window,
    window_of_layer,
)
from megatron.core.transformer.dot_product_attention import DotProductAttention
from tests.support import tolerances
from tests.support.one_process import tiny_config

S, B, N, D = 10, 2, 4, 8


def inputs(num_groups: int = N, keys: int = S) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((S, B, N, D), (keys, B, num_groups, D), (keys, B, num_groups, D))
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in shapes
    ]


def formula(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor,
    bias: Tensor | float = 0.0,
    sink: Tensor | None = None,
) -> Tensor:
    """Head by head, in loops over groups.  A sink is one more key, whose value is 0."""
    heads, per_group = [], q.shape[2] // k.shape[2]
    for head in range(q.shape[2]):
        group = head // per_group
        scores = torch.einsum("qbd,kbd->bqk", q[:, :, head], k[:, :, group]) / math.sqrt(D)
        own_bias = bias[0, head] if torch.is_tensor(bias) else bias
        scores = (scores + own_bias).masked_fill(~seen, float("-inf"))
        weights = scores.exp()
        total = weights.sum(-1, keepdim=True) + (0 if sink is None else sink[head].exp())
        heads.append(torch.einsum("bqk,kbd->qbd", weights / total, v[:, :, group]))
    return torch.cat(heads, -1)


def request_of(dtype: torch.dtype, head_dim: int, **more: Any) -> AttentionRequest:
    return AttentionRequest(dtype=dtype, head_dim=head_dim, **more)


def documents(*lengths: int) -> Tensor:
    index = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return index[:, None] == index[None]


def packed(*lengths: int) -> PackedSeqParams:
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends)


def bounds(*rows: tuple[int, ...]) -> PackedBounds:
    ends = [torch.tensor(row).cumsum(0).tolist() for row in rows]
    is_end = [torch.tensor([i + 1 in row for i in range(S)]) for row in ends]
    return PackedBounds.of_rows([PackedBounds.of_documents(row) for row in is_end])


CAUSAL = torch.ones(S, S).tril().bool()
SHORT = (torch.arange(S)[:, None] - torch.arange(S)) <= 3
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], Tensor]] = {
    "causal": ({}, {}, CAUSAL),
    "bidirectional": ({}, {"attn_mask_type": AttnMaskType.no_mask}, torch.ones(S, S).bool()),
    "documents": ({}, {"attention_mask": ~documents(4, 6)[None, None]}, CAUSAL & documents(4, 6)),
    "bounds of documents": (
        {},
        {"attention_mask": bounds((4, 6), (1, 2, 6, 1))},
        CAUSAL & torch.stack([documents(4, 6), documents(1, 2, 6, 1)]),
    ),
    "packed": ({}, {"packed_seq_params": packed(3, 2, 5)}, CAUSAL & documents(3, 2, 5)),
    "window": ({"window_size": (3, 0)}, {}, CAUSAL & SHORT),
    "query_key_layer_scaling": ({"apply_query_key_layer_scaling": True}, {}, CAUSAL),
}


@pytest.mark.parametrize("backend", [AttnBackend.auto, AttnBackend.flash, AttnBackend.unfused])
@pytest.mark.parametrize("num_groups", [4, 2, 1])
@pytest.mark.parametrize("case", CASES)
def test_each_backend_is_the_formula(backend: AttnBackend, num_groups: int, case: str) -> None:
    config, call, seen = CASES[case]
    core = DotProductAttention(tiny_config(attention_backend=backend, **config), layer_number=3)
    scale = torch.linspace(-1, 1, S * B * N * D, dtype=torch.float64).view(S, B, -1)
    ours, plain = inputs(num_groups), inputs(num_groups)
    limits = tolerances.of(torch.float64)
    out, expected = core(*ours, **call), formula(*plain, seen)
    torch.testing.assert_close(out, expected, **limits)
    (out * scale).sum().backward()
    (expected * scale).sum().backward()
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a.grad, b.grad, **limits)


@pytest.mark.feature(
    "Attention: softmax off by one and learnable sinks (--softmax-type), in kernels and the formula"
)
@pytest.mark.parametrize("kind", ["off-by-one", "learnable"])
@pytest.mark.parametrize("case", CASES)
def test_a_sink_is_a_key_without_a_value(
    kind: str, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context_parallel, "_QUERIES", 3)  # a window in parts
    context_parallel._bands.cache_clear()
    options, call, seen = CASES[case]
    config = tiny_config(softmax_type=kind, params_dtype=torch.float64, **options)
    core = DotProductAttention(config, layer_number=3)
    sink = torch.zeros(N, dtype=torch.float64)
    if core.softmax_offset is not None:
        sink = torch.linspace(-1, 3, N, dtype=torch.float64).requires_grad_()
        core.softmax_offset.data.copy_(sink)
    weight = torch.linspace(-1, 1, S * B * N * D, dtype=torch.float64).view(S, B, -1)
    ours, plain = inputs(2), inputs(2)
    limits = tolerances.of(torch.float64)
    out, expected = core(*ours, **call), formula(*plain, seen, sink=sink)
    torch.testing.assert_close(out, expected, **limits)
    (out * weight).sum().backward()
    (expected * weight).sum().backward()
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a.grad, b.grad, **limits)
    if core.softmax_offset is not None:
        torch.testing.assert_close(core.softmax_offset.grad, sink.grad, **limits)
    if not call:  # fewer queries than keys, as while generating
        torch.testing.assert_close(core(ours[0][-2:], *ours[1:]), expected[-2:], **limits)


def test_a_sink_takes_a_kernel_where_there_is_nothing_but_causality() -> None:
    able = request_of(torch.float32, D, by_blocks=True)
    assert choose(AttnBackend.auto, able) == ("flash",)
    assert choose(AttnBackend.auto, replace(able, has_mask=True)) == ("plain",)


@pytest.mark.parametrize("backend", [AttnBackend.auto, AttnBackend.unfused])
def test_alibi_is_added_to_the_scores(backend: AttnBackend) -> None:
    core = DotProductAttention(tiny_config(attention_backend=backend), layer_number=1)
    bias = alibi_bias(alibi_slopes(N), torch.arange(S), S)
    out = core(*inputs(), attention_bias=bias)
    expected = formula(*inputs(), CAUSAL, bias.double())
    torch.testing.assert_close(out, expected, **tolerances.of(torch.float64))
    assert alibi_slopes(4).tolist() == [2**-2, 2**-4, 2**-6, 2**-8]
    six = [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]
    assert alibi_slopes(6).tolist() == six


@pytest.mark.parametrize("backend", [AttnBackend.auto, AttnBackend.unfused])
def test_one_new_query_sees_all_earlier_keys_and_two_see_their_own(backend: AttnBackend) -> None:
    core = DotProductAttention(tiny_config(attention_backend=backend), layer_number=1)
    q, k, v = inputs()
    expected = formula(q, k, v, CAUSAL)
    for count in (1, 2):
        out = core(q[-count:], k, v)
        torch.testing.assert_close(out, expected[-count:], **tolerances.of(torch.float64))


@pytest.mark.parametrize("mask_type", [AttnMaskType.causal, AttnMaskType.no_mask])
def test_padding_between_packed_sequences_is_seen_by_nobody(mask_type: AttnMaskType) -> None:
    core = DotProductAttention(tiny_config(), layer_number=1)
    params = packed(4, 6)
    params.cu_seqlens_q_padded = params.cu_seqlens_q
    params.cu_seqlens_q = torch.tensor([0, 3, 7]).int()
    q, k, v = inputs()
    out = core(q, k, v, attn_mask_type=mask_type, packed_seq_params=params)
    for real in (slice(0, 3), slice(4, 8)):
        alone = core(q[real], k[real], v[real], attn_mask_type=mask_type)
        torch.testing.assert_close(out[real], alone, **tolerances.of(torch.float64))


def test_the_soft_cap_squashes_scores() -> None:
    core = DotProductAttention(tiny_config(attn_logit_softcapping=0.5), layer_number=1)
    q, k, v = inputs()
    scores = torch.einsum("qbnd,kbnd->bnqk", q, k) / math.sqrt(D)
    probs = (0.5 * torch.tanh(scores / 0.5)).masked_fill(~CAUSAL, float("-inf")).softmax(-1)
    expected = torch.einsum("bnqk,kbnd->qbnd", probs, v).flatten(2)
    torch.testing.assert_close(core(q, k, v), expected, **tolerances.of(torch.float64))


def test_half_precision_softmax_in_fp32_is_closer_to_the_truth() -> None:
    errors = []
    for in_fp32 in (False, True):
        config = tiny_config(
            attention_backend=AttnBackend.unfused, attention_softmax_in_fp32=in_fp32
        )
        core = DotProductAttention(config, layer_number=1)
        q, k, v = (t.detach().bfloat16() for t in inputs())
        expected = formula(q.double(), k.double(), v.double(), CAUSAL)
        errors.append(float((core(q, k, v) - expected).norm()))
    assert errors[1] <= errors[0]


def test_attention_dropout_keeps_the_mean_and_has_no_kernel_on_the_cpu() -> None:
    torch.manual_seed(0)
    core = DotProductAttention(tiny_config(attention_dropout=0.4), layer_number=1)
    q, k, v = (t.detach() for t in inputs())
    mean = torch.stack([core(q, k, v) for _ in range(800)]).mean(0)
    torch.testing.assert_close(mean, core.eval()(q, k, v), rtol=0, atol=0.2)
    assert choose(AttnBackend.auto, request_of(torch.float32, D, has_dropout=True)) == ("plain",)


@pytest.mark.feature("Kernels: a kernel that cannot run is announced, and another one runs")
@pytest.mark.parametrize(
    ("wanted", "asked", "used", "reason"),
    [
        ("flash", {"has_softcap": True}, "plain", "flash: it does not support soft-capped scores"),
        ("flash", {"has_dropout": True}, "plain", "it does not support dropout on the CPU"),
        ("fused", {}, "flash", "fused: it needs a GPU; efficient: it needs a GPU"),
        ("fused", {"causal_tokens": 256}, "blocks", "it needs a GPU"),
    ],
)
def test_a_kernel_that_cannot_run_is_announced_and_another_one_runs(
    wanted: str, asked: dict[str, Any], used: str, reason: str
) -> None:
    request = request_of(torch.float32, 64, **asked)
    assert choose(AttnBackend[wanted], request) == (used,)
    warning = fallback_warning(AttnBackend[wanted], request)
    assert warning is not None
    assert warning.startswith(f"--attention-backend {wanted} is without effect (")
    assert reason in warning
    assert warning.endswith(f"{used} is used instead")
    assert fallback_warning(AttnBackend.auto, request) is None


def test_kernels_of_a_gpu_are_refused_by_what_they_lack() -> None:
    def gpu(**changes: Any) -> AttentionRequest:
        values: dict[str, Any] = {"is_cuda": True, "dtype": torch.bfloat16, "head_dim": 128}
        return AttentionRequest(**values | changes)

    assert choose(AttnBackend.auto, gpu()) == ("flash", "fused", "efficient")
    assert refusal("flash", gpu(dtype=torch.float32)) == "it has no kernel for float32"
    assert refusal("fused", gpu(head_dim=192)) == "it does not support head dimension 192"
    assert refusal("flash", gpu(has_mask=True)) == (
        "it supports only causal masks, windows and packed sequences, without bias"
    )
    assert refusal("efficient", gpu(has_mask=True)) is None
    assert choose(AttnBackend.auto, gpu(has_softcap=True)) == ("plain",)


@pytest.mark.feature(
    "Attention: windows and packed sequences in flash attention of a GPU, without a mask in memory"
)
@pytest.mark.parametrize("by_blocks", [False, True])
def test_windows_and_packed_sequences_run_in_the_flash_kernel_of_a_gpu(by_blocks: bool) -> None:
    def gpu(**changes: Any) -> AttentionRequest:
        values: dict[str, Any] = {"dtype": torch.bfloat16, "head_dim": 128, "has_band": True}
        return AttentionRequest(is_cuda=True, by_blocks=by_blocks, **values | changes)

    assert choose(AttnBackend.auto, gpu()) == ("flash",)
    others = attention_report(AttnBackend.auto, gpu())
    assert others["plain"] == "a faster implementation is used"
    dropout = "it does not support dropout with windows or packed sequences"
    assert refusal("flash", gpu(has_dropout=True)) == dropout
    odd = "the head dimension 100 is not a multiple of 8"
    assert refusal("flash", gpu(head_dim=100)) == odd
    assert "flash" not in choose(AttnBackend.auto, gpu(has_mask=True))
    assert "flash" not in choose(AttnBackend.auto, gpu(dtype=torch.float32))
    assert by_blocks or choose(AttnBackend.fused, gpu()) == ("fused", "efficient")
    on_cpu = request_of(torch.bfloat16, 64, has_band=True, by_blocks=by_blocks)
    assert choose(AttnBackend.auto, on_cpu) == (("plain",) if by_blocks else ("flash",))


def test_values_narrower_than_keys_run_in_cudnn_where_it_takes_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for cached in (choose, refusal):
        cached.cache_clear()
    monkeypatch.setattr(attention_blocks, "cudnn_failure", lambda *_: None)

    def gpu(**changes: Any) -> AttentionRequest:
        values: dict[str, Any] = {"head_dim": 192, "value_dim": 128, "causal_tokens": 64}
        return AttentionRequest(is_cuda=True, dtype=torch.bfloat16, **values | changes)

    assert choose(AttnBackend.auto, gpu()) == choose(AttnBackend.auto, gpu(capability=(10, 0)))
    assert choose(AttnBackend.auto, gpu()) == ("fused",)
    padded = ("flash", "efficient")
    assert choose(AttnBackend.auto, gpu(has_band=True)) == ("flash",)
    assert choose(AttnBackend.auto, gpu(has_dropout=True)) == padded
    assert choose(AttnBackend.auto, gpu(causal_tokens=0)) == padded
    assert choose(AttnBackend.auto, gpu(is_deterministic=True)) == padded
    assert choose(AttnBackend.flash, gpu()) == ("flash",)
    for other in (gpu(capability=(8, 0)), gpu(value_dim=64)):
        assert choose(AttnBackend.auto, other) == padded
        assert refusal("fused", other) == (
            "it takes narrower values from Hopper on, in the widths (192, 128)"
        )
    for cached in (choose, refusal):
        cached.cache_clear()


@pytest.mark.parametrize("by_blocks", [False, True])
def test_a_gpu_whose_cudnn_fails_uses_another_kernel(by_blocks: bool) -> None:
    more: dict[str, Any] = {"head_dim": 192, "value_dim": 128, "causal_tokens": 64}
    if by_blocks:
        more = {"head_dim": 64, "by_blocks": True}
    request = AttentionRequest(is_cuda=True, dtype=torch.bfloat16, capability=(12, 0), **more)
    # There is no cuDNN on a CPU: the trial fails as with a kernel that a GPU lacks.
    assert str(refusal("fused", request)).startswith("cuDNN: ")
    assert "fused" not in choose(AttnBackend.auto, request)


def test_a_trial_of_cudnn_compares_with_the_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    failure = attention_blocks.cudnn_failure.__wrapped__
    plain = attention_blocks._KERNELS["plain"]
    monkeypatch.setitem(attention_blocks._KERNELS, "fused", plain)
    assert failure(192, 128, torch.bfloat16) is None
    wrong = plain._replace(backward=lambda *call: [1.05 * g for g in plain.backward(*call)])
    monkeypatch.setitem(attention_blocks._KERNELS, "fused", wrong)
    assert failure(192, 128, torch.bfloat16) == "cuDNN computes other values than the formula"


def test_torch_may_use_the_chosen_kernels_only_until_a_call_ends() -> None:
    cuda = torch.backends.cuda

    def enabled() -> tuple[bool, ...]:
        return (
            cuda.flash_sdp_enabled(),
            cuda.cudnn_sdp_enabled(),
            cuda.mem_efficient_sdp_enabled(),
            cuda.math_sdp_enabled(),
        )

    before = enabled()
    with OnlyKernels(("flash", "efficient")):
        assert enabled() == (True, False, True, False)
        with OnlyKernels(("fused",)):
            assert enabled() == (False, True, False, False)
        assert enabled() == (True, False, True, False)
    with pytest.raises(ValueError, match="kernel"), OnlyKernels(("fused",)):
        raise ValueError("a kernel refuses")
    assert enabled() == before


@pytest.mark.parametrize("training", [True, False])
def test_values_narrower_than_keys_are_padded_for_other_kernels(training: bool) -> None:
    query, key, value = inputs()
    narrow = value.detach()[..., :5].clone().requires_grad_()
    core = DotProductAttention(tiny_config(), layer_number=1).train(training)
    out = core(query, key, narrow).unflatten(-1, (N, D))
    expected = formula(query, key, F.pad(narrow, (0, D - 5)), CAUSAL).unflatten(-1, (N, D))
    torch.testing.assert_close(out, expected, **tolerances.of(torch.float64))
    (grad,) = torch.autograd.grad(out.square().sum(), narrow)
    (wanted,) = torch.autograd.grad(expected.square().sum(), narrow)
    torch.testing.assert_close(grad, wanted, **tolerances.of(torch.float64))


def test_the_report_has_a_reason_for_each_backend() -> None:
    request = request_of(torch.float32, 64)
    assert attention_report(AttnBackend.auto, request) == {
        "blocks": "it supports only causal attention in training",
        "flash": "chosen",
        "fused": "it needs a GPU",
        "efficient": "it needs a GPU",
        "plain": "a faster implementation is used",
    }
    excluded = "--attention-backend local excludes it"
    assert attention_report(AttnBackend.local, request)["flash"] == excluded


def test_training_on_short_sequences_runs_in_blocks() -> None:
    def able(dtype: torch.dtype = torch.float32, **changes: Any) -> tuple[str, ...]:
        return choose(AttnBackend.auto, request_of(dtype, 64, **{"causal_tokens": 1024} | changes))

    assert able() == able(torch.bfloat16) == able(has_dropout=True) == ("blocks",)
    assert able(causal_tokens=1025) == able(has_mask=True) == able(torch.float16) == ("flash",)
    on_gpu = AttentionRequest(is_cuda=True, dtype=torch.bfloat16, head_dim=64, causal_tokens=8)
    assert refusal("blocks", on_gpu) == "it runs on CPUs only"
    rows = attention_report(AttnBackend.auto, request_of(torch.float16, 64, causal_tokens=2048))
    assert rows["blocks"] == "it has no fast matmul for float16"
    rows = attention_report(AttnBackend.auto, request_of(torch.float32, 64, causal_tokens=127))
    assert rows["blocks"] == "a kernel is faster for 127 tokens"
    assert able(torch.bfloat16, causal_tokens=127) == ("blocks",)
    rows = attention_report(AttnBackend.auto, request_of(torch.float32, 64, causal_tokens=2048))
    assert rows["blocks"] == "it would save the probabilities of 2048 tokens"


@pytest.mark.parametrize("num_groups", [4, 2])
def test_blocks_are_the_kernel(num_groups: int) -> None:
    results = []
    for backend in (AttnBackend.auto, AttnBackend.flash):
        torch.manual_seed(0)
        q, k, v = (
            torch.randn(128, 1, heads, D, dtype=torch.float64, requires_grad=True)
            for heads in (N, num_groups, num_groups)
        )
        core = DotProductAttention(tiny_config(attention_backend=backend), layer_number=1)
        out = core(q, k, v)
        out.square().sum().backward()
        results.append((out, q.grad, k.grad, v.grad))
        assert ("Causal" in out.grad_fn.next_functions[0][0].name()) == (backend.name == "auto")
    torch.testing.assert_close(*results, **tolerances.of(torch.float64))


def test_evaluation_runs_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(
        dot_product_attention,
        "choose_for",
        lambda *_, causal_tokens, **more: [seen.append(causal_tokens), ("flash",)][1],
    )
    core = DotProductAttention(tiny_config(), layer_number=1)
    core(*inputs())
    core.eval()(*inputs())
    assert seen == [S, 0]


def visible_keys(window: tuple[int, int] | None, is_causal: bool, **more: Any) -> VisibleKeys:
    values = {"num_queries": S, "num_keys": S, "window": visible_window(S, window, is_causal)}
    return VisibleKeys(**{**values, **more})


def test_masks_are_made_only_where_causality_is_not_enough() -> None:
    here = torch.device("cpu")
    for window in (None, (S, 0)):
        visible = visible_keys(window, is_causal=True)
        assert (visible.mask(here), visible.is_causal, visible.is_band) == (None, True, False)
    visible = visible_keys(None, is_causal=False)
    assert (visible.mask(here), visible.is_causal, visible.is_band) == (None, False, False)
    visible = visible_keys((2, 1), is_causal=False)
    assert (visible.is_causal, visible.is_band) == (False, True)
    distance = torch.arange(S) - torch.arange(S)[:, None]
    mask = visible.mask(here)
    assert mask is not None
    assert torch.equal(mask, (distance >= -2) & (distance <= 1))


def test_a_band_has_no_mask_of_the_caller_and_ends_at_the_last_key() -> None:
    assert visible_keys(None, is_causal=True, packed=packed(4, 6)).is_band
    assert visible_keys(None, is_causal=True, num_queries=4).is_band
    assert visible_keys(None, is_causal=True, num_queries=4, first_query=S - 4).is_band
    assert not visible_keys(None, is_causal=True, num_queries=4, first_query=2).is_band
    assert not visible_keys(None, is_causal=True, num_queries=4, packed=packed(4, 6)).is_band
    hidden = ~documents(4, 6)
    assert not visible_keys((2, 0), is_causal=True, hidden=hidden).is_band


def test_bounds_for_kernels_cover_all_tokens_of_all_rows() -> None:
    params = packed(3, 2)
    assert params.kernel_bounds(5, 1).tolist() == [0, 3, 5, 5]
    bounds = params.kernel_bounds(8, 2)
    assert (bounds.tolist(), bounds.dtype) == ([0, 3, 5, 8, 11, 13, 16], torch.int32)
    assert params.kernel_bounds(8, 2) is bounds
    assert params.longest(8) == 8
    assert params.lengths == (3, 2)
    assert (params.longest(8), params.longest(9)) == (3, 4)


def test_a_causal_mask_is_recognized() -> None:
    assert is_causal_mask(~CAUSAL[None, None])
    assert not is_causal_mask(~(CAUSAL & documents(4, 6))[None, None])
    assert not is_causal_mask(torch.zeros(S, S).bool())
    assert not is_causal_mask(torch.zeros(1, 1, 1, S).bool())
    assert band(2, 5, -1, 0, torch.device("cpu")).tolist() == [
        [True, True, True, True, False],
        [True] * 5,
    ]


def test_windows_alternate_as_asked() -> None:
    def pattern(skip: Any) -> list[bool]:
        config = tiny_config(window_size=(4, 0), window_attn_skip_freq=skip)
        return [window_of_layer(config, i) is not None for i in range(6)]

    assert pattern(None) == [True] * 6
    assert pattern(3) == [True, True, False] * 2
    assert pattern((1, 0, 0, 1, 1, 0)) == [True, False, False, True, True, False]
    assert window_of_layer(tiny_config(), 0) is None

"""Compare the attention core on a GPU with the formula in float64, without masks and waits.

python -m tests.support.host_gpu tests/support/flash_cases.py
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron.core import device
from megatron.core.enums import AttnMaskType
from megatron.core.packed_seq_params import PackedBounds, PackedSeqParams
from megatron.core.transformer import attention_backends, attention_masks
from megatron.core.transformer.attention_blocks import cudnn_failure
from megatron.core.transformer.dot_product_attention import DotProductAttention
from tests.gpu import test_attention_blocks as blocks
from tests.support import tolerances
from tests.support.host_gpu import torch_cuda
from tests.support.one_process import tiny_config

S = 24
N = 4
D = 16


@dataclass
class Case:
    """An attention call: which keys are visible, and how the core is asked for them."""

    window: tuple[int, int] | None = None
    lengths: tuple[int, ...] = ()  # of packed sequences; the tokens after them are padding
    documents: tuple[tuple[int, ...], ...] = ()  # their lengths in each row
    rows: int = 1
    queries: int = S
    is_causal: bool = True
    softmax: str = "vanilla"
    value_dim: int = D
    call: dict[str, Any] = field(default_factory=dict)


CASES = {
    "window": Case(window=(5, 0), rows=2),
    "window of one": Case(window=(0, 0)),
    "window on both sides": Case(window=(3, 2), rows=2, is_causal=False),
    "window to the right": Case(window=(-1, 2), is_causal=False),
    "packed": Case(lengths=(7, 1, 12, 1, 3)),
    "packed rows": Case(lengths=(10, 14), rows=3),
    "documents": Case(documents=((7, 1, 12, 1, 3), (24,), (2, 22)), rows=3),
    "documents in a window": Case(documents=((1, 15, 8), (20, 4)), rows=2, window=(4, 0)),
    "packed with padding": Case(lengths=(1, 9, 6)),
    "packed window": Case(lengths=(1, 15, 8), window=(4, 0)),
    "packed without causality": Case(lengths=(5, 19), is_causal=False),
    "fewer queries": Case(queries=5, rows=2),
    "fewer queries in a window": Case(queries=5, window=(3, 0)),
    "narrow values": Case(rows=2, value_dim=8),
    "narrow values in a window": Case(rows=2, value_dim=8, window=(5, 0)),
    "narrow values of documents": Case(value_dim=8, documents=((7, 1, 16),)),
    "sink and window": Case(window=(5, 0), rows=2, softmax="off-by-one"),
    "sink and packed window": Case(lengths=(1, 15, 8), window=(4, 0), softmax="off-by-one"),
}


def visible(case: Case) -> Tensor:
    queries = torch.arange(S - case.queries, S)[:, None]
    keys = torch.arange(S)
    left, right = case.window or (-1, -1)
    seen = keys <= queries + (0 if case.is_causal else S if right < 0 else right)
    seen &= keys >= queries - (S if left < 0 else left)
    if case.lengths:
        tail = S - sum(case.lengths)
        sizes = torch.tensor([*case.lengths, tail])
        index = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
        seen &= index[-case.queries :, None] == index
    if case.documents:
        rows = [torch.tensor(n) for n in case.documents]
        index = torch.stack([torch.arange(len(n)).repeat_interleave(n) for n in rows])[:, None]
        return seen & (index[..., None] == index[..., None, :])
    return seen


def formula(qkv: list[Tensor], seen: Tensor, softmax: str) -> Tensor:
    q, k, v = (x.permute(1, 2, 0, 3) for x in qkv)
    k, v = (x.repeat_interleave(N // x.shape[1], 1) for x in (k, v))
    weights = (q @ k.mT / math.sqrt(D)).masked_fill(~seen, -math.inf).exp()
    total = weights.sum(-1, keepdim=True) + (softmax != "vanilla")
    return (weights / total @ v).permute(2, 0, 1, 3).flatten(2)


def run(case: Case, groups: int) -> int:
    """Compare one case; return how often the host waited for the device."""
    generator = torch.Generator().manual_seed(0)
    widths = (groups, D), (groups, case.value_dim)
    shapes = ((case.queries, case.rows, N, D), *[(S, case.rows, *width) for width in widths])
    host = [torch.randn(shape, generator=generator).half() for shape in shapes]
    scale = torch.linspace(-0.5, 0.5, N * case.value_dim, dtype=torch.float64)
    exact = [x.double().requires_grad_() for x in host]
    scale = scale.half().double()
    expected = formula(exact, visible(case), case.softmax)
    (expected * scale).sum().backward()
    ours = [x.to("cuda").requires_grad_() for x in host]
    scale = scale.half().to("cuda")
    call: dict[str, Any] = {}
    if not case.is_causal:
        call["attn_mask_type"] = AttnMaskType.no_mask
    if case.lengths:
        ends = torch.tensor([0, *case.lengths]).cumsum(0).int().to("cuda")
        call["packed_seq_params"] = PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends)
    if case.documents:
        rows = [PackedBounds(torch.tensor([0, *n]).cumsum(0), max(n)) for n in case.documents]
        cumulative, longest = PackedBounds.of_rows(rows)
        call["attention_mask"] = PackedBounds(cumulative.int().to("cuda"), longest)
    config = tiny_config(kv_channels=D, window_size=case.window, softmax_type=case.softmax)
    core = DotProductAttention(config, layer_number=1)
    if case.softmax != "vanilla" and case.lengths:
        assert call["packed_seq_params"].lengths  # a ring of one rank reads them once
    before = torch_cuda.waits()
    out = core(*ours, **call).unflatten(-1, (N, -1))[..., : case.value_dim].flatten(2)
    (out * scale).sum().backward()
    waits: int = torch_cuda.waits() - before
    limits = tolerances.of(torch.float16)
    torch.testing.assert_close(out.cpu().double(), expected, **limits)
    for x, wanted in zip(ours, exact, strict=True):
        assert x.grad is not None
        torch.testing.assert_close(x.grad.cpu().double(), wanted.grad, **limits)
    return waits


def no_mask(*_: Any) -> Any:
    raise AssertionError("a mask is built")


def main() -> None:
    """Print the waits of each case; raise where a value is wrong."""
    device.choose("cuda")
    attention_backends.NARROW_WIDTHS = (D, 8)  # type: ignore[assignment]
    for width in (D, 8):  # the trial synchronizes, once
        assert cudnn_failure(D, width, torch.float16) is None
    for name, dtype in blocks.CASES:
        blocks.check(name, dtype, "cuda")
    attention_masks.band = attention_masks.band_at = no_mask  # type: ignore[assignment]
    print(json.dumps({f"{n}, {g}": run(c, g) for n, c in CASES.items() for g in (4, 2, 1)}))


main()

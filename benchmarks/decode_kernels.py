"""Compare the kernels of token generation on a CPU with torch: linear layers and attention.

    python -m benchmarks.decode_kernels [--rounds 9]

One thread; contenders alternate; results are medians of wall time.  Each call of a linear layer
takes other weights, 200 MB in turn, so that they come from memory as in a model.  Keys and values
are in pages of 16 tokens in random order; torch's SDPA reads contiguous copies of each head, which
a page cache does not have.  The read bandwidth is that of a sum over 256 MB, measured in the same
turns.  Dated results are in kernels.md.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.fusions.paged_attention import PagedBatch, PagedRule, paged_attention, store
from megatron.core.fusions.small_linear import Weight, quantize_weight, small_linear

Times = dict[str, float]
_CYCLED_BYTES = 200 << 20  # of weights in float32
_PAGE = 16
_SHAPES = ((768, 768), (3072, 768), (768, 3072), (50304, 768))
_ROWS = (1, 2, 4, 8, 16, 64, 512)
# name, query heads, key heads, width, rows and keys of each segment
_CASES = (
    ("prompt of 512, 12 heads of 64", 12, 12, 64, [512], [512]),
    ("prompt of 512, 32 on 8 heads of 128", 32, 8, 128, [512], [512]),
    ("1 request of 1,024, 12 heads of 64", 12, 12, 64, [1], [1024]),
    ("8 requests of 1,024, 12 heads of 64", 12, 12, 64, [1] * 8, [1024] * 8),
    ("8 requests of 1,024, 32 on 8 heads of 128", 32, 8, 128, [1] * 8, [1024] * 8),
)


def alternate(contenders: dict[str, Callable[[], object]], rounds: int) -> Times:
    """Return the median milliseconds of each contender, after one warmup round."""
    seen: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds + 1):
        for name, work in contenders.items():
            started_at_s = time.perf_counter()
            work()
            if turn:
                seen[name].append(1e3 * (time.perf_counter() - started_at_s))
    return {name: statistics.median(times) for name, times in seen.items()}


def linears(rounds: int) -> Iterator[str]:
    """Yield a row for each size of weight and number of rows."""
    large = torch.randn(1 << 26)
    for outputs, width in _SHAPES:
        copies = max(2, _CYCLED_BYTES // (4 * outputs * width))
        weights = [torch.randn(outputs, width) for _ in range(copies)]
        bias = torch.randn(outputs)
        forms: dict[str, list[Weight]] = {
            "fp32": [*weights],
            "bf16": [w.bfloat16() for w in weights],
            "int8": [quantize_weight(w) for w in weights],
        }

        def by_torch(x: Tensor, weights: list[Tensor] = weights, bias: Tensor = bias) -> None:
            for w in weights:
                F.linear(x, w, bias)

        def by_kernel(x: Tensor, weights: list[Weight], bias: Tensor = bias) -> None:
            for w in weights:
                small_linear(x, w, bias)

        for rows in _ROWS if outputs < 50304 else _ROWS[:5]:
            x = torch.randn(rows, width)
            kernels = {name: partial(by_kernel, x, form) for name, form in forms.items()}
            work = {"torch": partial(by_torch, x), **kernels, "read": large.sum}
            ms = {name: found / copies for name, found in alternate(work, rounds).items()}
            speed = 4e-6 * outputs * width / ms["fp32"]
            most = 1e-6 * large.nbytes / (ms["read"] * copies)
            columns = [f"{ms[name]:.3f}" for name in ("torch", *forms)]
            columns += [f"{ms['torch'] / ms['fp32']:.2f}", f"{ms['fp32'] / ms['bf16']:.2f}"]
            columns += [f"{ms['fp32'] / ms['int8']:.2f}", f"{speed:.1f}", f"{speed / most:.2f}"]
            yield f"| {outputs} x {width} | {rows} | {' | '.join(columns)} |"


def attention(rounds: int) -> Iterator[str]:
    """Yield a row for each case and dtype."""
    for dtype in (torch.float32, torch.bfloat16):
        for name, heads, groups, width, rows, lengths in _CASES:
            found = alternate(_contenders(heads, groups, width, rows, lengths, dtype), rounds)
            num_bytes = 2 * sum(lengths) * groups * width * dtype.itemsize
            label = {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
            sdpa = found["torch"]
            kernel = found["kernel"]
            speed = num_bytes / kernel / 1e6
            yield (
                f"| {name}, {label} | {sdpa:.3f} | {kernel:.3f} | {sdpa / kernel:.2f} | "
                f"{speed:.1f} |"
            )


def _contenders(
    heads: int, groups: int, width: int, rows: list[int], lengths: list[int], dtype: torch.dtype
) -> dict[str, Callable[[], object]]:
    pages = [-(-n // _PAGE) for n in lengths]
    order = torch.randperm(sum(pages)).split(pages)
    shape = sum(pages), _PAGE, groups, width
    keys = torch.zeros(shape, dtype=dtype)
    values = torch.zeros(shape, dtype=dtype)
    table = torch.zeros(len(lengths), max(pages), dtype=torch.int32)
    inputs = []
    for line, own, count, length in zip(table, order, rows, lengths, strict=True):
        line[: len(own)] = own
        k, v = (torch.randn(length, groups, width).to(dtype) for _ in range(2))
        at = torch.arange(length)
        store(keys, values, k, v, own[at // _PAGE] * _PAGE + at % _PAGE)
        q = torch.randn(count, heads, width).to(dtype)
        inputs.append([x.transpose(0, 1)[None].contiguous() for x in (q, k, v)])
    query = torch.cat([q[0].transpose(0, 1) for q, _, _ in inputs])
    first_row = torch.tensor([0, *rows]).cumsum(0).int()
    batch = PagedBatch(first_row, torch.tensor(lengths, dtype=torch.int32), table)
    rule = PagedRule(width**-0.5)

    def sdpa() -> object:
        return [
            F.scaled_dot_product_attention(
                q, k, v, is_causal=q.shape[2] > 1, enable_gqa=heads != groups
            )
            for q, k, v in inputs
        ]

    return {"torch": sdpa, "kernel": lambda: paged_attention(query, keys, values, batch, rule)}


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(1)
    titles = ["W", "rows", "torch ms", "fp32 ms", "bf16 ms", "int8 ms", "torch / fp32"]
    titles += ["fp32 / bf16", "fp32 / int8", "GB/s", "of read"]
    print(f"| {' | '.join(titles)} |\n{'|---' * len(titles)}|")
    for row in linears(args.rounds):
        print(row, flush=True)
    print("| attention | SDPA ms | kernel ms | SDPA / kernel | GB/s |\n|---|---|---|---|---|")
    for row in attention(args.rounds):
        print(row, flush=True)


if __name__ == "__main__":
    main()

"""Launches of every Triton kernel with the sizes of large runs; the tensors have no memory."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron.core.fusions.adam_step import Step, Updated

BF16 = torch.bfloat16
FP32 = torch.float32
_LONG = 2**18  # tokens
_FP8 = torch.float8_e4m3fn, torch.float8_e5m2


def large_launches() -> dict[str, Callable[[], object]]:
    """Return one function for each module of kernels; it launches all kernels of the module."""
    prefix = "_launch_"
    found = {n.removeprefix(prefix): f for n, f in globals().items() if n.startswith(prefix)}
    return {name: (lambda f=f, name=name: f(_module(name))) for name, f in found.items()}


def _module(name: str) -> Any:
    return importlib.import_module(f"megatron.core.fusions.triton.{name}")


def _empty(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _leaf(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return _empty(*shape, dtype=dtype).requires_grad_()


def _launch_adam(adam: Any) -> None:
    size = 2**34  # one buffer of parameters
    step = Step(
        number=_empty(dtype=FP32),
        corrections=_empty(2, dtype=FP32),
        divisor=_empty(dtype=FP32),
        accepted=_empty(dtype=torch.bool),
        lr=1e-3,
        betas=(0.9, 0.95),
        eps=1e-8,
        weight_decay=0.1,
    )
    exponents = _empty(size // 128, dtype=torch.int8)
    lower = _empty(size, dtype=torch.int16)
    wide = _empty(size, dtype=FP32), None, False
    half = _empty(size, dtype=torch.float16), exponents, True
    eighth = _empty(size, dtype=torch.float8_e4m3fn), exponents, False
    for updated in (
        Updated(_empty(size), lower, _empty(size), wide, wide),
        Updated(wide[0], None, wide[0], eighth, half, _empty(size)),
    ):
        adam._launch([updated], step, adam._formats(updated))


def _launch_norm(norm: Any) -> None:
    for width in (1024, 8192):
        x = _leaf(2**33 // width, width)
        residual = _leaf(*x.shape, dtype=FP32)
        weight = _leaf(width)
        bias = _leaf(width)
        both = norm.norm_of_sum(x, bias, residual, 0.1, (weight, bias), 1e-5)
        torch.autograd.backward(both, [torch.empty_like(y) for y in both])
        total, _ = norm.norm_of_sum(x, bias, residual, 0.1, (None, None), 0.0)
        total.backward(torch.empty_like(total))


def _launch_bias_activation(fusion: Any) -> None:
    x = _leaf(_LONG, 2**16)
    fusion.bias_activation(x, _leaf(2**16), "gelu").backward(torch.empty_like(x))


def _launch_glu(glu: Any) -> None:
    grad = _empty(_LONG, 2**16)
    for clamp, weights in ((7.0, _leaf(_LONG, dtype=FP32)), (None, None)):
        glu.glu(_leaf(_LONG, 2**17), "silu", clamp, 1.0, weights).backward(grad)


def _launch_cross_entropy(loss: Any) -> None:
    for tokens, width in ((2**17, 152064), (2**15, 2**18)):
        logits = _empty(tokens, width)
        target = _empty(tokens, dtype=torch.int64)
        wide = _empty(tokens, dtype=FP32)
        loss.loss_and_gradient(logits, target, width - 7, 1.0)
        loss.own_sums(logits, target, width, width - 7)
        loss.logits_to_grad_(logits, target, wide, width, width - 7, 1.0)
        loss.logits_to_grad_(logits, target, wide, width, width - 7, wide)


def _heads(tokens: int, num_heads: int, width: int) -> Tensor:
    """Return [s, 1, n, d] with the tokens of a head adjacent, as some attention gradients are."""
    return _empty(1, num_heads, tokens, width).permute(2, 0, 1, 3)


def _launch_rope(rope: Any) -> None:
    angles = _empty(_LONG, 1, 1, 64, dtype=FP32)
    rope.rotate(_empty(_LONG, 1, 128, 128), angles, angles, False, 1)
    rope.rotate(_heads(_LONG, 128, 128), angles, angles, False, -1)
    rope.split(_empty(_LONG, 2, 16, 10 * 128), 128, (angles, angles))
    rope.join(tuple(_heads(_LONG, n, 128) for n in (128, 16, 16)), (angles, angles))


def _launch_router(router: Any) -> None:
    for num_experts, k, groups in ((256, 8, (8, 4, 2)), (2048, 32, (1, 1, 1))):
        logits = _empty(2**22, num_experts, dtype=FP32)
        for score in (router.SIGMOID, router.SOFTMAX, router.CHOSEN_SOFTMAX):
            how = {"score": score, "scale": 1.5}
            bias = _empty(num_experts, dtype=FP32) if score == router.SIGMOID else None
            experts, weights = router.choose(logits, bias, k, groups=groups, **how)
            router.gradient(logits, experts, weights, **how)


def _launch_permute(permute: Any) -> None:
    permute.order_by_expert(_empty(2**27, dtype=torch.int64), 512)
    permute.sum_of_rows(_empty(2**20, 7168), _empty(2**17, 8, dtype=torch.int64))


def _launch_quantize(quantize: Any) -> None:
    x = _empty(2**20, 2**14)
    amax = _empty(dtype=FP32)
    to = torch.float8_e4m3fn
    quantize.cast(x, to, amax, 0)
    quantize.cast_both(x, torch.float8_e5m2, amax, 0)
    for block in ((1, 128), (128, 128), (128, 1), (1, 32), (32, 1)):
        quantize.by_block(x, to, block)
    quantize.by_block(_empty(2**22, 2**12), to, (1, 128))
    quantize.transposed(_empty(*x.shape, dtype=to))
    quantize.transposed(_empty(256, 7168, 2048, dtype=to))
    rows = _empty(2**21, 7168)
    ends = _empty(256, dtype=torch.int32)
    amax = _empty(256, dtype=FP32)
    quantize.amax_of_groups(rows, ends)
    for to in _FP8:
        quantize.quantize_groups(rows, to, ends, amax=amax, turned=True)
        for block in (128, 32):
            quantize.quantize_groups(rows, to, ends, block=block, turned=True)
    matrices = _empty(256, 2048, 7168)
    quantize.quantize_matrices(matrices, _FP8[0], 128, is_square=True)
    for turned in (False, True):
        quantize.quantize_matrices(matrices, _FP8[0], 32, turned=turned)


def _launch_grouped_matmul(fusion: Any) -> None:
    grad = _empty(2**21, 7168)
    rows = _empty(2**21, 2048)
    ends = _empty(256, dtype=torch.int32)
    for dtype, keep in ((FP32, True), (BF16, False)):
        fusion.add_products(grad, rows, ends, _empty(256, 7168, 2048, dtype=dtype), keep=keep)
    m = 2**21
    ends = _empty(256, dtype=torch.int32)
    scale = _empty(256, dtype=FP32)
    length = fusion.tiles_of(m, 256) * fusion.TILE
    matrices = _empty(256, 2048, 7168, dtype=_FP8[0])
    total = _empty(256, 2048, 7168, dtype=FP32)
    for to, fast in zip(_FP8, (True, False), strict=True):
        codes = _empty(m, 7168, dtype=to)
        fusion.product((codes, scale), (matrices, scale), ends, BF16, fast=fast)
        turned = _empty(2048, length, dtype=to)
        columns = _empty(7168, length, dtype=_FP8[0])
        fusion.add_scaled_products((turned, scale), (columns, scale), ends, total, keep=True)
        for block in (128, 32):
            of_rows = _empty(7168 // block, m, dtype=FP32)
            wide = block == 128
            of_matrices = _empty(256, 7168 // block, 2048 // 128 if wide else 2048, dtype=FP32)
            fusion.product(
                (codes, of_rows),
                (matrices, of_matrices),
                ends,
                BF16,
                block=block,
                is_square=wide,
            )
            left = turned, _empty(length // block, 2048, dtype=FP32)
            right = columns, _empty(length // block, 7168, dtype=FP32)
            fusion.add_scaled_products(left, right, ends, total, keep=False, block=block)


def _launch_matmul(matmul: Any) -> None:
    for dtype in (BF16, FP32):
        rows, columns = (_empty(_LONG, 2**14, dtype=dtype) for _ in range(2))
        matmul.linear(rows, columns, _empty(_LONG, dtype=dtype))
        matmul.linear(_empty(2**21, 1024, dtype=dtype), _empty(4096, 1024, dtype=dtype), None)
        turned = _empty(2**14, _LONG, dtype=dtype).t()
        matmul.linear(turned, turned, None)


def _launch_paged_attention(paged: Any) -> None:
    shapes = (
        *((8, 64, 128, 128, BF16), (1, 128, 576, 512, BF16), (8, 16, 256, 256, BF16)),
        *((8, 16, 256, 256, FP32), (8, 64, 64, 64, torch.float16)),
    )
    bounds = [_empty(n, dtype=torch.int32) for n in (9, 8)]
    table = _empty(8, 2**12, dtype=torch.int32)
    for groups, heads, width, value_width, dtype in shapes:
        keys = _empty(2**21, 16, groups, width, dtype=dtype)
        values = _empty(2**21, 16, groups, value_width, dtype=dtype)
        rule = {"scale": 0.1, "softcap": 30.0, "window": 4096, "sink": _empty(heads, dtype=FP32)}
        query = _empty(8, heads, width, dtype=dtype)
        paged.attend(query, keys, values, (*bounds, table), **rule)


def _launch_scan(scan: Any) -> None:
    tokens = 2**17
    batch = 16
    heads = 128
    groups = 8
    length = scan.LENGTH
    for is_batch_first in (False, True):

        def rows(num_heads: int, width: int, first: bool = is_batch_first) -> Tensor:
            if first:
                m = _empty(batch, tokens, num_heads, width).transpose(0, 1)
            else:
                m = _empty(tokens, batch, num_heads, width)
            return m.requires_grad_()

        steps = _leaf(2, tokens // length, batch, heads, length, dtype=FP32)
        state = _leaf(batch, heads, 64, 128, dtype=FP32)
        sequence = _empty(tokens // length, length, dtype=torch.int64)
        B = rows(groups, 128)
        C = rows(groups, 128)
        both = scan.scan(rows(heads, 64), steps, B, C, _leaf(heads), state, sequence)
        torch.autograd.backward(both, [torch.empty_like(y) for y in both])

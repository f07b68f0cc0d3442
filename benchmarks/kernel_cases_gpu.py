"""Cases that `benchmarks.kernels` measures on a GPU: parts of an 8 B model, in bf16."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from benchmarks.kernel_cases import Case, both_ways, drawn
from megatron.core import device
from megatron.core.activations import openai_gelu, quick_gelu
from megatron.core.fusions.bias_glu import activation, glu
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.fusions.linear_cross_entropy import VocabularyPart, loss_and_gradient
from megatron.core.fusions.quantize import product, quantize, quantize_and_look
from megatron.core.fusions.rms_norm import adds_in_norm, norm_rows, norm_rows_of_sum
from megatron.core.fusions.rope import RotaryTable, apply_rotary, split_and_rotate
from megatron.core.low_precision import E4M3, Block
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer.update_rules import AdamW
from megatron.core.ssm.scan import chunked_scan
from megatron.core.transformer.moe.token_dispatcher import by_expert, combine

_TOKENS, _WIDTH, _INNER, _VOCABULARY = 8192, 4096, 14336, 128256


def _loss() -> Case:
    logits, target = drawn(_TOKENS, _VOCABULARY), torch.randint(_VOCABULARY, (_TOKENS,))
    target, group = target.to(logits.device), ProcessGroup(0, 1)
    return Case(
        "loss and gradient of the logits",
        2 * logits.nbytes,
        lambda: loss_and_gradient(logits, target, VocabularyPart(group, _VOCABULARY)),
    )


def _gated(name: str, act: Callable[[Tensor], Tensor], *how: float) -> Case:
    return both_ways(name, lambda x: glu(x, act, *how), drawn(_TOKENS, 2 * _INNER), passes=4)


def _bias_gelu() -> Case:
    x = drawn(_TOKENS, _INNER)
    bias = drawn(_INNER)
    return both_ways(
        "GELU of a sum with a bias", lambda x, b: activation(x, openai_gelu, b), x, bias, passes=5
    )


def _weighed() -> Case:
    x, weights = drawn(_TOKENS, 2 * _INNER), drawn(_TOKENS, dtype=torch.float32)
    return both_ways(
        "SwiGLU weighed by a router", lambda x, w: glu(x, F.silu, weights=w), x, weights, passes=4
    )


def _rotary() -> Case:
    x, angles = drawn(_TOKENS, 1, 48, 128)[:, :, :32], drawn(_TOKENS, 1, 1, 64)
    table = RotaryTable(angles.cos(), angles.sin())
    return both_ways("rotary positions", lambda x: apply_rotary(x, table), x, passes=4)


def _split_rotary() -> Case:
    packed = drawn(_TOKENS, 1, 8, 6 * 128).requires_grad_()
    angles = drawn(_TOKENS, 1, 1, 64)
    table = RotaryTable(angles.cos(), angles.sin())
    grads = [drawn(_TOKENS, 1, heads, 128) for heads in (32, 8, 8)]

    def work() -> None:
        parts = split_and_rotate(packed, 128, table, fused=True)
        torch.autograd.grad(parts, packed, grads)

    return Case("QKV split and rotary positions", 4 * packed.nbytes, work)


def _norm_of_sum() -> Case:
    shapes = ((_TOKENS, _WIDTH), (_TOKENS, _WIDTH), (_WIDTH,))
    x, residual, weight = leaves = [drawn(*shape).requires_grad_() for shape in shapes]
    grad = drawn(_TOKENS, _WIDTH)

    def work() -> None:
        if adds_in_norm(x, None, residual):
            both = norm_rows_of_sum((x, None), residual, 0.0, (weight, None), 1e-5)
        else:
            total = get_bias_dropout_add(True, False)((x, None), residual, 0.0)
            both = total, norm_rows(total, weight, None, 1e-5)
        torch.autograd.grad(both, leaves, (grad, grad))

    return Case("residual and RMSNorm", 8 * x.nbytes, work)


def _rows() -> Case:
    experts = torch.rand(_TOKENS, 64).topk(8).indices.to(device.current())
    order, rows = by_expert(experts), drawn(8 * _TOKENS, _WIDTH // 2)
    num_bytes = rows.nbytes + rows.nbytes // 8
    return Case("8 rows of each token summed", num_bytes, lambda: combine(rows, order))


def _scan() -> Case:
    """Return the scan of a Mamba-2 layer with 64 heads of 64 and states of 128, in one group."""
    x = drawn(_TOKENS, 1, 64, 64)
    B = drawn(_TOKENS, 1, 1, 128)
    C = drawn(_TOKENS, 1, 1, 128)
    dt = torch.rand(_TOKENS, 1, 64).add_(0.01).to(x.device)
    leaves = [m.requires_grad_() for m in (x, dt, B, C)]
    decay = -torch.ones(64, device=x.device)
    grad = drawn(_TOKENS, 1, 64, 64)

    def work() -> None:
        y, _ = chunked_scan(x, dt, decay, B, C)
        torch.autograd.grad(y, leaves, grad)

    # x and y, their gradients, and x again; the states of 128 chunks, eight times.
    return Case("state-space scan", 5 * x.nbytes + 8 * (_TOKENS // 64) * 64 * 64 * 128 * 2, work)


def _adam(moments: str, num_bytes: int) -> Case:
    config = OptimizerConfig(exp_avg_dtype=moments, exp_avg_sq_dtype=moments)
    params = [nn.Parameter(drawn(_WIDTH, _WIDTH)) for _ in range(8)]
    rule = AdamW([{"params": params, "lr": 1e-4, "weight_decay": 0.1}], config)
    for param in params:
        param.grad = drawn(_WIDTH, _WIDTH)

    def step() -> None:
        rule.begin_step()
        rule.step()

    name = f"AdamW, bf16 and 16 bits, moments in {moments}"
    return Case(name, num_bytes * len(params) * _WIDTH**2, step)


def _quantized(name: str, block: Block | None) -> Case:
    x = drawn(_TOKENS, _WIDTH)
    return Case(name, x.numel() * 3, lambda: quantize(x, E4M3, block))


def _delayed() -> Case:
    x, known = drawn(_TOKENS, _WIDTH), torch.ones((), device=device.current())
    name = "fp8, delayed scale, with the largest value"
    return Case(name, x.numel() * 3, lambda: quantize_and_look(x, E4M3, known, 0))


def _weight_gradient() -> Case:
    """Return a weight gradient 16 wide: the transposed copies take nearly all of its time."""
    x, thin = quantize(drawn(_TOKENS, _WIDTH), E4M3), quantize(drawn(_TOKENS, 16), E4M3)
    name = "fp8 product over tokens, 16 wide"
    return Case(name, 3 * x.codes.nbytes, lambda: product(thin.t(), x.t(), torch.bfloat16))


CASES: list[Callable[[], Case]] = [
    _loss,
    _bias_gelu,
    partial(_gated, "SwiGLU", F.silu),
    partial(_gated, "GeGLU", F.gelu),
    partial(_gated, "clamped quick GeGLU", quick_gelu, 7.0, 1.0),
    _weighed,
    _rotary,
    _split_rotary,
    _norm_of_sum,
    _rows,
    _scan,
    partial(_adam, "fp32", 26),
    partial(_adam, "bf16", 18),
    partial(_adam, "fp8", 14),
    partial(_quantized, "fp8, one scale", None),
    partial(_quantized, "fp8, a scale for 1 x 128", (1, 128)),
    partial(_quantized, "fp8, a scale for 128 x 1", (128, 1)),
    partial(_quantized, "fp8, a scale for 128 x 128", (128, 128)),
    _delayed,
    _weight_gradient,
]

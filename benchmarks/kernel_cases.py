"""Cases that `benchmarks.kernels` measures, at the sizes of a layer with hidden size 1,024.

``num_bytes`` are the bytes to read and write if every value is transferred once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core import device
from megatron.core.activations import openai_gelu
from megatron.core.distributed.grad_buffer import add_into
from megatron.core.fusions.bias_glu import activation, glu
from megatron.core.fusions.causal_attention import causal_attention
from megatron.core.fusions.linear_cross_entropy import VocabularyPart, loss_and_gradient
from megatron.core.fusions.rms_norm import norm_rows
from megatron.core.fusions.rope import RotaryTable, apply_rotary
from megatron.core.optimizer.clip_grads import sum_of_squares
from megatron.core.transformer.moe.token_dispatcher import by_expert, combine

_TOKENS, _WIDTH, _VOCABULARY = 1024, 1024, 50304


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Case:
    """Case: ``work`` calls a public function; ``prepare`` runs before each call, not timed.

    With ``in_place``, ``work`` overwrites its input and needs no further memory.
    """

    name: str
    num_bytes: int
    work: Callable[[], object]
    prepare: Callable[[], object] = _nothing
    in_place: bool = False


def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device=device.current()).to(dtype)


def cross_entropy(dtype: torch.dtype) -> Case:
    """Return the case of cross entropy: logits to loss and gradient."""
    source = drawn(_TOKENS, _VOCABULARY, dtype=dtype)
    logits, target = source.clone(), torch.randint(_VOCABULARY, (_TOKENS,), device=source.device)
    group = ProcessGroup(0, 1)
    return Case(
        f"softmax cross entropy and its gradient, {_short(dtype)}",
        2 * logits.nbytes,
        lambda: loss_and_gradient(logits, target, VocabularyPart(group, _VOCABULARY)),
        lambda: logits.copy_(source),
        in_place=True,
    )


def both_ways(name: str, function: Callable[..., Tensor], *inputs: Tensor, passes: int) -> Case:
    """Return a case of forward and backward; moves ``passes`` times the first input's bytes."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = function(*leaves)
    grad = drawn(*out.shape, dtype=out.dtype)

    def work() -> None:
        torch.autograd.grad(function(*leaves), leaves, grad)

    return Case(name, passes * inputs[0].nbytes, work)


def _activation(act: Callable[[Tensor], Tensor], dtype: torch.dtype) -> Case:
    x = drawn(_TOKENS, 4 * _WIDTH, dtype=dtype)
    name = f"{act.__name__}, {_short(dtype)}"
    return both_ways(name, lambda x: activation(x, act), x, passes=5)


def _gated(act: Callable[[Tensor], Tensor], dtype: torch.dtype) -> Case:
    x = drawn(_TOKENS, 6 * _WIDTH, dtype=dtype)
    name = f"{act.__name__} of a gate, {_short(dtype)}"
    return both_ways(name, lambda x: glu(x, act), x, passes=4)


def _norm(*, is_rms: bool, dtype: torch.dtype) -> Case:
    x, weight, bias = (drawn(*n, dtype=dtype) for n in ((_TOKENS, _WIDTH), (_WIDTH,), (_WIDTH,)))

    def norm(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return norm_rows(x, weight, bias, 1e-5)

    if is_rms:
        return both_ways(f"RMSNorm, {_short(dtype)}", norm, x, weight, passes=5)
    return both_ways(f"LayerNorm, {_short(dtype)}", norm, x, weight, bias, passes=5)


def _rotary(*, interleaved: bool, dtype: torch.dtype) -> Case:
    x = drawn(_TOKENS, 1, 16, 192, dtype=dtype)[..., :64]  # strided: a third of qkv
    angles = drawn(_TOKENS, 1, 1, 32, dtype=torch.float32)
    table = RotaryTable(angles.cos().to(dtype), angles.sin().to(dtype), interleaved)
    name = f"rotary positions, {'neighbours' if interleaved else 'halves'}, {_short(dtype)}"
    return both_ways(name, lambda x: apply_rotary(x, table), x, passes=4)


def _attention(dtype: torch.dtype) -> Case:
    q, k, v = (drawn(_TOKENS, 1, 16, 64, dtype=dtype) for _ in range(3))
    name = f"causal attention with its products, {_short(dtype)}"
    return both_ways(name, lambda *a: causal_attention(*a, 0.125), q, k, v, passes=11)


def _addition() -> Case:
    total, more = drawn(4 * _WIDTH, _WIDTH, dtype=torch.float32), drawn(4 * _WIDTH, _WIDTH)
    num_bytes = 2 * total.nbytes + more.nbytes
    work = partial(add_into, total, more)
    return Case("bf16 gradient added to fp32", num_bytes, work, in_place=True)


def _rows(dtype: torch.dtype) -> Case:
    order = by_expert(torch.rand(_TOKENS, 64).topk(8).indices)
    rows = drawn(8 * _TOKENS, _WIDTH, dtype=dtype)
    name = f"8 rows of each token summed, {_short(dtype)}"
    return Case(name, rows.nbytes + rows.nbytes // 8, lambda: combine(rows, order))


def _squares(dtype: torch.dtype) -> Case:
    grads = [drawn(4 * _WIDTH, _WIDTH, dtype=dtype) for _ in range(8)]
    name = f"squares of gradients, {_short(dtype)}"
    return Case(name, 8 * grads[0].nbytes, lambda: sum_of_squares(grads))


def _short(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]


_FORMATS = (torch.bfloat16, torch.float32)
CASES: list[Callable[[], Case]] = [
    *(partial(cross_entropy, dtype) for dtype in _FORMATS),
    *(partial(_activation, act, d) for act in (F.gelu, openai_gelu) for d in _FORMATS),
    *(partial(_gated, act, d) for act in (F.silu, F.gelu) for d in _FORMATS),
    *(partial(_norm, is_rms=is_rms, dtype=d) for is_rms in (False, True) for d in _FORMATS),
    *(partial(_rotary, interleaved=i, dtype=d) for i in (False, True) for d in _FORMATS),
    *(partial(_attention, dtype) for dtype in _FORMATS),
    _addition,
    *(partial(make, dtype) for make in (_rows, _squares) for dtype in _FORMATS),
]

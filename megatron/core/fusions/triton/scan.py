"""The state-space scan of Mamba-2 in chunks of l tokens; `ssm.scan` has the formulas in torch.

`c` chunks of `l` tokens, `b` sequences, `h` heads of width `p`, `g` groups that share B and C,
state width `n`.  With a the sum of dt A within a chunk, and S the state before it, forward is

    made    sum over j of exp(a_last - a_j) dt_j x_j B_j^T          outer_products
    S       S of the next chunk = exp(a_last) S + made              pass_states
    y_i     sum over j <= i of (C_i B_j) exp(a_i - a_j) dt_j x_j + exp(a_i) S C_i + D x_i    outputs

and backward is the first two steps with C and dy in place of B and x, chunks in reverse order; then
`token_gradients` of x, dt and a, and of the products C_i B_j, summed over heads; then
`group_gradients` of B and C.  Except for the second step, one program computes a chunk and some
heads of a group.  The [l, l] weights are never in memory: plain torch writes and reads them in
float32 several times, and starts kernels for each chunk.

Operands of matmuls have the dtype of x, which is what mamba_ssm does too: weights, the states
before each chunk and the gradients of the products are rounded to it.  Sums, decays and the state
that is passed on are in float32.  128 tokens per chunk: a state has as many values as 64 heads' x
of 128 tokens, and with 64 tokens states are two thirds of all bytes.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from megatron.core.autograd import Context, Function
from megatron.core.device import capability, is_cuda
from megatron.core.fusions.triton.launch import power_of_2
from megatron.core.fusions.triton.scan_kernels import (
    group_gradients,
    outer_products,
    outputs,
    pass_states,
    product_gradients,
    token_gradients,
)

DTYPES = (torch.bfloat16, torch.float16)
LENGTH = 128  # tokens of a chunk, at most
_PROGRAMS = 256  # two per multiprocessor: a program takes more heads where there are more chunks
_STATE = 1024  # values of a state that one program passes from chunk to chunk


def scan(
    x: Tensor,
    steps: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    state: Tensor | None,
    sequence: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return y [s, b, h, p] in the dtype of x, B and C, and the last state [b, h, p, n] in float32.

    x [s, b, h, p], B and C [s, b, g, n], D [h]; ``steps`` [2, c, b, h, l] in float32: dt and a,
    with dt 0 and a unchanged where there is no token; ``state`` [b, h, p, n]; ``sequence`` [c, l].
    """
    return _Scan.apply(x, steps, B, C, D, state, sequence)


def length(x: Tensor) -> int:
    """Return the number of tokens of a chunk of x [s, ...], for which kernels are compiled."""
    most = LENGTH if _has_large_tiles(x.device, x.dtype) else min(LENGTH, 64)
    return min(most, max(32, power_of_2(x.shape[0])))


@cache
def _has_large_tiles(where: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the tiles of chunks of 128 tokens fit the shared memory: of H100 and B200."""
    return not is_cuda(where) or (dtype.itemsize == 2 and capability(where)[0] in (9, 10))


def takes(x: Tensor, state_width: int) -> bool:
    """Return whether the tiles of a chunk fit a program's registers and shared memory.

    Not in float32, whose matmuls take a compiler minutes.
    """
    return x.dtype in DTYPES and x.shape[3] <= 64 and state_width <= 128


class _Scan(Function[tuple[Tensor, Tensor]]):
    @staticmethod
    def forward(
        ctx: Context[None],
        x: Tensor,
        steps: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None,
        state: Tensor | None,
        sequence: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        x, B, C = map(_with_dense_heads, (x, B, C))
        if B.stride() != C.stride():
            B = B.contiguous()
            C = C.contiguous()
        steps = steps.contiguous()
        last = x.new_empty(*x.shape[1:], B.shape[-1], dtype=torch.float32)
        grid, sizes = _sizes(x, B, steps)
        states = _outer(x, B, steps, sequence, left=True)
        first = None if state is None else state.float().contiguous()
        _pass(states, first, last, steps[1], sequence, None, None)
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        outputs[grid](x, steps, B, C, D, states, sequence, y, *_strides(x), *_strides(B), **sizes)
        ctx.save_for_backward(x, steps, B, C, D, states, sequence)
        return y, last

    @staticmethod
    def backward(ctx: Context[None], grad: Tensor, of_last: Tensor) -> tuple[Tensor | None, ...]:
        x, steps, B, C, D, states, sequence = ctx.saved_tensors
        a = steps[1]
        grad = grad.contiguous()
        leaving = _outer(grad, C, steps, sequence, left=False)
        of_state = torch.empty_like(of_last, memory_format=torch.contiguous_format)
        blocks = triton.cdiv(x.shape[3] * B.shape[3], _STATE)
        of_keep = a.new_empty(*a.shape[:3], blocks)
        _pass(leaving, of_last.contiguous(), of_state, a, sequence, states, of_keep)
        grid, sizes = _sizes(x, B, steps)
        of_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        of_steps = torch.empty_like(steps)
        of_d = None if D is None else torch.empty_like(a)
        of_products = x.new_empty(*grid, *a.shape[3:], *a.shape[3:])
        of_logs = torch.empty_like(steps)
        token_gradients[grid](
            x,
            grad,
            B,
            C,
            steps,
            D,
            leaving,
            sequence,
            of_x,
            of_steps[0],
            of_d,
            *_strides(x),
            *_strides(B),
            **sizes,
        )
        product_gradients[grid](
            x,
            grad,
            B,
            C,
            steps,
            sequence,
            of_products,
            of_logs,
            *_strides(x),
            *_strides(B),
            **sizes,
        )
        rest = steps, of_products, of_logs, of_keep.sum(-1), sequence, of_steps[1]
        return (
            of_x,
            of_steps,
            _of_group(x, leaving, B, C, *rest, left=True),
            _of_group(grad, states, C, B, *rest, left=False),
            None if D is None or of_d is None else of_d.sum((0, 1, 3)).to(D.dtype),
            of_state if ctx.needs_input_grad[5] else None,
            None,
        )


def _with_dense_heads(m: Tensor) -> Tensor:
    """Return ``m`` [s, b, heads, width], copied if the values of a token are not dense."""
    return m if m.stride()[2:] == (m.shape[3], 1) else m.contiguous()


def _strides(m: Tensor) -> tuple[int, int]:
    return m.stride(0), m.stride(1)


def _sizes(x: Tensor, B: Tensor, steps: Tensor) -> tuple[tuple[int, int], dict[str, Any]]:
    """Return the grid, chunks and sequences by parts of the heads, and the sizes of a kernel."""
    (s, batch, heads, p), (groups, n) = x.shape, B.shape[2:]
    per_group = heads // groups
    length = steps.shape[4]
    rows = steps.shape[1] * batch
    fitting = (n for n in range(1, per_group) if per_group % n == 0)
    parts = next((n for n in fitting if rows * groups * n >= _PROGRAMS), per_group)
    sizes = {
        "tokens": s if s % length else None,
        "batch": batch,
        "heads": heads,
        "per_group": per_group,
        "PER": per_group // parts,
        "whole": steps[0].numel(),
        "L": length,
        "P": p,
        "N": n,
        "BP": max(16, power_of_2(p)),
        "BN": max(16, power_of_2(n)),
        "num_warps": 8 if length > 64 else 4,
    }
    return (rows, groups * parts), sizes


def _outer(x: Tensor, y: Tensor, steps: Tensor, sequence: Tensor | None, *, left: bool) -> Tensor:
    """Return the sum over each chunk's tokens of weight x y^T: [c, b, h, p, n]."""
    out = x.new_empty(*steps.shape[1:4], x.shape[3], y.shape[3])
    grid, sizes = _sizes(x, y, steps)
    outer_products[grid](x, y, steps, sequence, out, *_strides(x), *_strides(y), LEFT=left, **sizes)
    return out


def _of_group(
    x: Tensor,
    states: Tensor,
    own: Tensor,
    other: Tensor,
    steps: Tensor,
    of_products: Tensor,
    of_logs: Tensor,
    of_keep: Tensor,
    sequence: Tensor | None,
    of_a: Tensor,
    *,
    left: bool,
) -> Tensor:
    """Return the gradient of B from x and the gradients of states, or of C from dy and the states.

    That of B also writes the gradient of ``a``; that of C adds what the states before chunks have.
    """
    grid, sizes = _sizes(x, own, steps)
    parts = sizes["per_group"] // sizes["PER"]
    out = own.new_empty(parts, *own.shape, dtype=own.dtype if parts == 1 else torch.float32)
    group_gradients[grid](
        x,
        states,
        own,
        other,
        steps,
        of_products,
        of_logs,
        of_keep,
        sequence,
        out,
        of_a,
        *_strides(x),
        *_strides(own),
        groups=own.shape[2],
        of_part=own.numel(),
        LEFT=left,
        **sizes,
    )
    return out[0] if parts == 1 else out.sum(0).to(own.dtype)


def _pass(
    added: Tensor,
    first: Tensor | None,
    last: Tensor,
    a: Tensor,
    sequence: Tensor | None,
    states: Tensor | None,
    of_keep: Tensor | None,
) -> None:
    """Overwrite what each chunk adds with the state before it; write the last state to ``last``.

    With ``states``, go from the last chunk to the first, and write the gradient of each decay.
    """
    chunks, batch, heads, length = a.shape
    size = added.shape[3] * added.shape[4]
    pass_states[(batch * heads, triton.cdiv(size, _STATE))](
        added,
        first,
        last,
        a,
        sequence,
        states,
        of_keep,
        chunks,
        batch * heads,
        size,
        L=length,
        BLOCK=_STATE,
        num_warps=4,
    )

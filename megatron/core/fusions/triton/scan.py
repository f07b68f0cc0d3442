"""The state-space scan of Mamba-2 in chunks of l tokens; `ssm.scan` has the formulas in torch.

`c` chunks of `l` tokens, `b` sequences, `h` heads of width `p`, `g` groups that share B and C,
state width `n`.  With a the sum of dt A within a chunk, and S the state before it, forward is

    made    sum over j of exp(a_last - a_j) dt_j x_j B_j^T          one program per chunk and head
    S       S of the next chunk = exp(a_last) S + made              one program per block of a state
    y_i     sum over j <= i of (C_i B_j) exp(a_i - a_j) dt_j x_j + exp(a_i) S C_i + D x_i

and backward is the same three steps with C and dy in place of B and x, chunks in reverse order, and
one program per chunk and some heads of a group.  It recomputes the weights; the states before each
chunk are saved in the dtype of x.  The [l, l] weights are never in memory: plain torch writes and
reads them in float32 several times, and starts kernels for each chunk.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from megatron.core.autograd import Context, Function
from megatron.core.fusions.triton.scan_kernels import (
    gradients,
    outer_products,
    outputs,
    pass_states,
)

DTYPES = (torch.bfloat16, torch.float16)
_HEADS = 8  # of a group that one program of backward takes at most
_STATE = 1024  # values of a state that one program passes from chunk to chunk
_WARPS = 8
_STAGES = 1  # one stage: the tiles of two would not fit the shared memory


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

    x [s, b, h, p], B and C [s, b, g, n], D [h]; ``steps`` [2, c, l, b, h] in float32: dt and a,
    with dt 0 and a unchanged where there is no token; ``state`` [b, h, p, n]; ``sequence`` [c, l].
    """
    return _Scan.apply(x, steps, B, C, D, state, sequence)


def takes(x: Tensor, state_width: int, length: int) -> bool:
    """Return whether the tiles of a chunk fit a program's registers and shared memory.

    Not in float32, whose matmuls take a compiler minutes.
    """
    return x.dtype in DTYPES and x.shape[3] <= 64 and state_width <= 128 and length <= 64


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
        how = _sizes(x, B, steps)
        states = _outer(x, B, steps, sequence, how, left=True)
        first = None if state is None else state.float().contiguous()
        _pass(states, first, last, steps, sequence, None, None)
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        outputs[_grid(steps)](
            x, steps, B, C, D, states, sequence, y, *_strides(x), *_strides(B), **how
        )
        ctx.save_for_backward(x, steps, B, C, D, states, sequence)
        return y, last

    @staticmethod
    def backward(ctx: Context[None], grad: Tensor, of_last: Tensor) -> tuple[Tensor | None, ...]:
        x, steps, B, C, D, states, sequence = ctx.saved_tensors
        how = _sizes(x, B, steps)
        grad = grad.contiguous()
        leaving = _outer(grad, C, steps, sequence, how, left=False)
        of_state = torch.empty_like(of_last, memory_format=torch.contiguous_format)
        chunks, batch, heads = steps.shape[1], *x.shape[1:3]
        blocks = triton.cdiv(x.shape[3] * B.shape[3], _STATE)
        of_keep = steps.new_empty(chunks, batch, heads, blocks)
        _pass(leaving, of_last.contiguous(), of_state, steps, sequence, states, of_keep)
        per_group = heads // B.shape[2]
        taken = max(n for n in range(1, _HEADS + 1) if per_group % n == 0)
        parts = per_group // taken
        of_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        of_steps = torch.empty_like(steps)
        of_d = steps.new_empty(chunks, batch, heads)
        of_b, of_c = steps.new_empty(2, parts, *B.shape, dtype=torch.float32)
        gradients[(chunks * batch, B.shape[2], parts)](
            x,
            steps,
            B,
            C,
            D,
            states,
            leaving,
            of_keep.sum(-1),
            sequence,
            grad,
            of_x,
            of_steps,
            of_b,
            of_c,
            of_d,
            *_strides(x),
            *_strides(B),
            HEADS=taken,
            **how,
        )
        return (
            of_x,
            of_steps,
            of_b.sum(0).to(B.dtype),
            of_c.sum(0).to(C.dtype),
            None if D is None else of_d.sum((0, 1)).to(D.dtype),
            of_state if ctx.needs_input_grad[5] else None,
            None,
        )


def _with_dense_heads(m: Tensor) -> Tensor:
    """Return ``m`` [s, b, heads, width], copied if the values of a token are not dense."""
    return m if m.stride()[2:] == (m.shape[3], 1) else m.contiguous()


def _strides(m: Tensor) -> tuple[int, int]:
    return m.stride(0), m.stride(1)


def _grid(steps: Tensor) -> tuple[int, int]:
    _, chunks, _, batch, heads = steps.shape
    return chunks * batch, heads


def _sizes(x: Tensor, B: Tensor, steps: Tensor) -> dict[str, Any]:
    (s, batch, heads, p), (groups, n), length = x.shape, B.shape[2:], steps.shape[2]
    return {
        "tokens": s,
        "chunks": steps.shape[1],
        "length": length,
        "batch": batch,
        "heads": heads,
        "per_group": heads // groups,
        "P": p,
        "N": n,
        "BL": max(16, triton.next_power_of_2(length)),
        "BP": max(16, triton.next_power_of_2(p)),
        "BN": max(16, triton.next_power_of_2(n)),
        "num_warps": _WARPS,
        "num_stages": _STAGES,
    }


def _outer(
    x: Tensor, y: Tensor, steps: Tensor, sequence: Tensor | None, how: dict[str, Any], *, left: bool
) -> Tensor:
    """Return the sum over each chunk's tokens of weight x y^T: [c, b, h, p, n]."""
    _, chunks, _, batch, heads = steps.shape
    out = x.new_empty(chunks, batch, heads, x.shape[3], y.shape[3])
    outer_products[_grid(steps)](
        x, y, steps, sequence, out, *_strides(x), *_strides(y), LEFT=left, **how
    )
    return out


def _pass(
    added: Tensor,
    first: Tensor | None,
    last: Tensor,
    steps: Tensor,
    sequence: Tensor | None,
    states: Tensor | None,
    of_keep: Tensor | None,
) -> None:
    """Overwrite what each chunk adds with the state before it; write the last state to ``last``.

    With ``states``, go from the last chunk to the first, and write the gradient of each decay.
    """
    _, chunks, length, batch, heads = steps.shape
    size = added.shape[3] * added.shape[4]
    pass_states[(batch * heads, triton.cdiv(size, _STATE))](
        added,
        first,
        last,
        steps[1],
        sequence,
        states,
        of_keep,
        chunks,
        length,
        batch * heads,
        size,
        BLOCK=_STATE,
        num_warps=4,
    )

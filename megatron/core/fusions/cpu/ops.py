"""C++ kernels of a CPU; the functions return what the plain torch form returns.

Only `fusions.kernels.find` and `rms_norm` import them, for tensors that `cpu_kernels.take` accepts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.core.autograd import Context, Function
from megatron.core.device import cpu_kernels
from megatron.core.fusions.adam_step import Step, Updated

# Of AdamW, which torch's own kernel runs at memory bandwidth if all tensors are float32.
MOMENTS = (torch.float32, torch.bfloat16)
WEIGHTS = (torch.bfloat16,)
# A norm sums gradients of its parameters over at least so many rows, in at most so many pieces.
_ROWS = 16
_PIECES = 64


def glu(
    gate_up: Tensor, act: str, clamp: float | None, offset: float, weights: Tensor | None
) -> Tensor:
    """Compute act(gate) * (up + offset) * weight: [..., 2 f], contiguous, and [...] -> [..., f]."""
    bound = float("inf") if clamp is None else clamp
    return _GLU.apply(gate_up, weights, act, (bound, offset))


_Numbers = tuple[float, float]  # the bound of clamping and the offset


class _GLU(Function[Tensor]):
    @staticmethod
    def forward(
        ctx: Context[tuple[str, _Numbers]],
        gate_up: Tensor,
        weights: Tensor | None,
        act: str,
        numbers: _Numbers,
    ) -> Tensor:
        ctx.save_for_backward(gate_up, weights)
        ctx.values = act, numbers
        out = gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)
        _run_rows(f"{act}_glu", out, [gate_up, out, _in_float(weights)], numbers)
        return out

    @staticmethod
    def backward(ctx: Context[tuple[str, _Numbers]], grad: Tensor) -> tuple[Tensor | None, ...]:
        gate_up, weights = ctx.saved_tensors
        act, numbers = ctx.values
        out, dense = torch.empty_like(gate_up), _in_float(weights)
        of_weights = None if dense is None else torch.empty_like(dense)
        tensors = [gate_up, grad.contiguous(), out, dense, of_weights]
        _run_rows(f"{act}_glu_backward", grad, tensors, numbers)
        if of_weights is not None:
            of_weights = of_weights.to(weights.dtype)
        return out, of_weights, None, None


def _in_float(weights: Tensor | None) -> Tensor | None:
    return None if weights is None else weights.float().contiguous()


def _run_rows(kernel: str, like: Tensor, tensors: list[Tensor | None], numbers: _Numbers) -> None:
    """Run a kernel over the rows of ``like`` [..., f]."""
    width = max(1, like.shape[-1])
    cpu_kernels.run(
        kernel,
        tensors,
        format=like.dtype,
        sizes=(width,),
        numbers=numbers,
        count=like.numel() // width,
        width=width,
    )


def activation(x: Tensor, act: str) -> Tensor:
    """Compute the activation of a contiguous tensor."""
    return _Activation.apply(x, act)


class _Activation(Function[Tensor]):
    @staticmethod
    def forward(ctx: Context[str], x: Tensor, act: str) -> Tensor:
        ctx.save_for_backward(x)
        ctx.values = act
        out = torch.empty_like(x)
        cpu_kernels.run(act, [x, out], format=x.dtype, count=x.numel())
        return out

    @staticmethod
    def backward(ctx: Context[str], grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        out = torch.empty_like(x)
        tensors = [x, grad.contiguous(), out]
        cpu_kernels.run(f"{ctx.values}_backward", tensors, format=x.dtype, count=x.numel())
        return out, None


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Normalize [..., h], contiguous, with weight [h]; an RMSNorm if there is no bias.

    Float32 statistics and x are saved for backward.  Gradients of weight and bias are summed within
    blocks of rows, then over the blocks in order.
    """
    return _Norm.apply(x, weight, bias, eps)


class _Norm(Function[Tensor]):
    @staticmethod
    def forward(
        ctx: Context[None], x: Tensor, weight: Tensor, bias: Tensor | None, eps: float
    ) -> Tensor:
        out, width = torch.empty_like(x), x.shape[-1]
        rows = x.numel() // width
        scale = x.new_empty(rows, dtype=torch.float32)
        mean = None if bias is None else torch.empty_like(scale)
        cpu_kernels.run(
            "rms_norm" if bias is None else "layer_norm",
            [x, weight, bias, out, mean, scale],
            format=x.dtype,
            sizes=(width,),
            numbers=(eps,),
            count=rows,
            width=width,
        )
        ctx.save_for_backward(x, weight, scale, *([] if mean is None else [mean]))
        return out

    @staticmethod
    def backward(ctx: Context[None], grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale, *means = ctx.saved_tensors
        mean = means[0] if means else None
        grad, rows, width = grad.contiguous(), len(scale), x.shape[-1]
        out = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        piece = max(_ROWS, -(-rows // _PIECES))
        pieces = -(-rows // piece)
        sums = [x.new_empty(pieces, width, dtype=torch.float32)]
        if mean is not None:
            sums.append(torch.empty_like(sums[0]))
        cpu_kernels.run(
            "rms_norm_backward" if mean is None else "layer_norm_backward",
            [x, weight, mean, scale, grad, out, *sums, *([None] if mean is None else [])],
            format=x.dtype,
            sizes=(width, piece),
            count=rows,
            grain=piece,
        )
        totals: list[Tensor | None] = [torch.empty_like(weight) for _ in sums]
        for part, total in zip(sums, totals, strict=True):
            tensors = [part, total]
            sizes = (width, pieces)
            cpu_kernels.run("sum_of_pieces", tensors, format=x.dtype, count=width, sizes=sizes)
        return out, totals[0], None if mean is None else totals[1], None


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, sign: int) -> Tensor:
    """Rotate [s, b, n, d] (last dim contiguous) by angles [s, 1 or b, 1, r/2] -> [s, b, n, d]."""
    tokens, sequences, heads, width = x.shape
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    angles, by_sequence = cos.shape[-1], cos.shape[1] > 1
    tables = [table.to(x.dtype).contiguous() for table in (cos, sin)]
    cpu_kernels.run(
        "rotate",
        [x, *tables, out],
        format=x.dtype,
        sizes=(sequences, heads, width, angles, *x.stride()[:3], by_sequence, interleaved),
        numbers=(sign,),
        count=tokens * sequences,
        width=heads * width,
    )
    return out


def loss_and_gradient(logits: Tensor, target: Tensor, columns: int, scale: float) -> Tensor:
    """Return the loss of each token; ``logits`` [t, p] become (softmax - onehot) * scale.

    ``columns`` of the p are in the vocabulary.  A token with a negative target has loss 0.
    """
    loss = _numbers_of_rows(logits)
    _run_over_logits("cross_entropy", logits, [target, loss], (columns, 0), scale)
    return loss


def own_sums(logits: Tensor, target: Tensor, first: int, columns: int) -> tuple[Tensor, Tensor]:
    """Return the log-sum-exp of each row and the target's logit (or 0), in one read.

    A target is a global id; ``first`` is the id of the first column of this rank.
    """
    log_sum, at_target = _numbers_of_rows(logits), _numbers_of_rows(logits)
    _run_over_logits("own_sums", logits, [target, log_sum, at_target], (columns, first))
    return log_sum, at_target


def logits_to_grad_(
    logits: Tensor, target: Tensor, log_sum: Tensor, first: int, columns: int, scale: float | Tensor
) -> None:
    """Overwrite ``logits`` with (softmax - onehot) * scale; ``scale`` is a scalar or [t]."""
    scales = scale.float().contiguous() if isinstance(scale, Tensor) else None
    of_all = 1.0 if isinstance(scale, Tensor) else scale
    beside = [target, log_sum.contiguous(), scales]
    _run_over_logits("gradients_of_log_sums", logits, beside, (columns, first), of_all)


def _numbers_of_rows(logits: Tensor) -> Tensor:
    return logits.new_empty(len(logits), dtype=torch.float32)


def _run_over_logits(
    kernel: str,
    logits: Tensor,
    beside: list[Tensor | None],
    where: tuple[int, int],
    scale: float = 1.0,
) -> None:
    """Run a kernel over the rows; ``beside`` are its arguments, the target first."""
    assert beside[0] is not None, "rows have targets"
    beside[0] = beside[0].long().contiguous()
    cpu_kernels.run(
        kernel,
        [logits, *beside],
        format=logits.dtype,
        sizes=(logits.shape[1], *where),
        numbers=(scale,),
        count=len(logits),
        width=logits.shape[1],
    )


def update(updated: Sequence[Updated], step: Step) -> None:
    """Update parameters by AdamW, one after the other.

    The storage formats are those of `optimizer.reduced_precision_state`.  The result of an element
    does not depend on its address, so sharded updates are bitwise identical to unsharded ones.
    """
    for each in updated:
        _update(each, step)


def _update(updated: Updated, step: Step) -> None:
    param, lower, grad, (means, *_), (squares, *_), weight = updated
    beta1, beta2 = step.betas
    of_mean, of_square = float(step.corrections[0]), float(step.corrections[1])
    rounded = [name for name, kept in (("mean", means), ("square", squares)) if kept.itemsize == 2]
    cpu_kernels.run(
        " ".join(["adam", *rounded]),
        [param, lower, grad, means, squares, weight],
        format=grad.dtype,
        sizes=(int(step.number),),
        numbers=(
            float(step.divisor),
            1 - step.lr * step.weight_decay,
            1 - beta1,
            beta2,
            1 - beta2,
            math.sqrt(of_square),
            step.eps,
            step.lr / of_mean,
        ),
        count=param.numel(),
    )
    torch.autograd.graph.increment_version([t for t in (param, weight) if t is not None])


def sum_of_rows(rows: Tensor, row: Tensor) -> Tensor:
    """Return for each token the sum of its k rows of ``rows`` [m, h]: [n, h].

    ``row`` [n, k] holds indices of rows; indices >= m are skipped.  Sums are in float32, in
    the order of the k entries.
    """
    width, (tokens, visits) = rows.shape[1], row.shape
    out = rows.new_empty(tokens, width)
    cpu_kernels.run(
        "sum_of_rows",
        [rows, row.long().contiguous(), out],
        format=rows.dtype,
        sizes=(width, visits, len(rows)),
        count=tokens,
        width=max(1, width * visits),
    )
    return out

"""The loss of each token without extra copies of the logits.

``t`` tokens, ``h`` hidden size, ``v`` vocabulary without padding, ``p`` padded local vocabulary.
Logits [t, p] in the compute dtype are overwritten with softmax minus one-hot, which backward needs,
a few rows at a time in float32.  Logits and their gradient never exist in float32 for all tokens,
and never both at once.  `tensor_parallel.fused_linear_cross_entropy` adds the output layer, and can
compute the logits of some tokens at a time.  Collectives over the group: one max, one sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core import device
from megatron.core.config.errors import DataError
from megatron.core.fusions import kernels

# Elements in float32 at a time: on a CPU a few rows that stay in its cache.
_ELEMENTS_CPU = 1 << 19
_ELEMENTS_GPU = 1 << 27
_ROWS_WITHOUT_GRADIENT = 256
# Probabilities below 6e-8 vanish in fp16; the factor is divided out again in backward.
_FP16_SCALE = 1024.0
_TINY = 1e-30


class VocabularyPart(NamedTuple):
    """A rank's part of the vocabulary: ``num_columns`` of p are ids; ``cap`` caps logits."""

    group: ProcessGroup
    num_columns: int
    cap: float | None = None


def loss_and_gradient(logits: Tensor, target: Tensor, part: VocabularyPart) -> Tensor:
    """Return the loss of each token; ``logits`` [t, p] become its gradient times `gradient_scale`.

    Does not apply the cap of ``part``.  Collective over its group.
    """
    rows = _Rows(target, part, logits.shape)
    if part.group.size() == 1:
        return _turn_into_gradient(logits, rows)
    return _turn_into_gradient_divided(logits, rows, part.group)


def gradient_scale(dtype: torch.dtype) -> float:
    """Return the factor that keeps the gradients of `loss_and_gradient` in range of ``dtype``."""
    return _FP16_SCALE if dtype == torch.float16 else 1.0


class _Rows:
    """Positions of the targets: local column, whether it is on this rank, whether it counts."""

    def __init__(self, target: Tensor, part: VocabularyPart, shape: Sequence[int]) -> None:
        num_rows, width = shape
        if target.shape != (num_rows,):
            raise DataError(
                f"{target.numel()} labels do not fit {num_rows} tokens: pass labels of the shape "
                "of the tokens"
            )
        columns = part.num_columns
        self.columns, self.ignored = columns, target < 0
        self.target, self.first = target, part.group.rank() * width
        self.is_mine: Tensor | None = None  # everything that counts
        if part.group.size() == 1:
            self.index = target.clamp_min(0).unsqueeze(-1)
        else:
            index = target - self.first
            self.is_mine = (index >= 0) & (index < columns)
            self.index = index.masked_fill(~self.is_mine, 0).unsqueeze(-1)

    def hide_padding(self, logits: Tensor) -> None:
        """Set columns beyond the vocabulary to -inf, so that they do not enter a softmax."""
        if self.columns < logits.shape[1]:
            logits[:, self.columns :] = float("-inf")

    def at_target(self, values: Tensor, part: slice) -> Tensor:
        """Return the target's entry of each row; zero if another rank has it."""
        found = values.gather(-1, self.index[part]).squeeze(-1)
        return found if self.is_mine is None else found.masked_fill(~self.is_mine[part], 0)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _parts(logits: Tensor) -> Iterator[slice]:
    """Yield slices of rows that are converted to float32 at a time."""
    elements = _ELEMENTS_GPU if device.is_cuda(logits.device) else _ELEMENTS_CPU
    step = max(1, elements // logits.shape[1])
    for i in range(0, logits.shape[0], step):
        yield slice(i, i + step)


def _kernels(logits: Tensor) -> ModuleType | None:
    return kernels.find("cross_entropy", logits) if logits.is_contiguous() else None


def _turn_into_gradient(logits: Tensor, rows: _Rows) -> Tensor:
    """Overwrite ``logits`` with (softmax - onehot) * scale; return the loss of each token."""
    loss: Tensor
    scale = gradient_scale(logits.dtype)
    if fused := _kernels(logits):
        loss = fused.loss_and_gradient(logits, rows.target, rows.columns, scale)
        return loss
    loss = logits.new_empty(logits.shape[0], dtype=_wide(logits.dtype))
    rows.hide_padding(logits)
    for part in _parts(logits):
        values = logits[part]
        prob = torch.softmax(values, -1, dtype=loss.dtype)
        at_target = rows.at_target(prob, part)
        loss[part] = _loss_of(values, at_target, rows, part)
        prob.scatter_(-1, rows.index[part], (at_target - 1).unsqueeze(-1))
        values.copy_(prob if scale == 1 else prob.mul_(scale))
    return loss.masked_fill_(rows.ignored, 0)


def _loss_of(values: Tensor, prob_at_target: Tensor, rows: _Rows, part: slice) -> Tensor:
    """Return -log of the target's probability, also if the probability underflows in float32."""
    if not device.is_cuda(values.device) and bool((prob_at_target > _TINY).all()):
        return -prob_at_target.log()
    wide = values.to(_wide(values.dtype))
    return wide.logsumexp(-1) - rows.at_target(wide, part)


def _turn_into_gradient_divided(logits: Tensor, rows: _Rows, group: ProcessGroup) -> Tensor:
    """Do the same if the columns are sharded over ranks."""
    log_sum, at_target = _own_sums(logits, rows, slice(None))
    log_sum = _sum_over_ranks(log_sum, at_target, group)
    _write_gradient(logits, rows, log_sum, gradient_scale(logits.dtype))
    return (log_sum - at_target).masked_fill_(rows.ignored, 0)


def gradient_from_sums(
    logits: Tensor,
    target: Tensor,
    sums: tuple[Tensor, Tensor],
    vocabulary: VocabularyPart,
) -> None:
    """Overwrite uncapped ``logits`` [t, p] with their gradient.  No communication.

    ``sums``: for each token the results of `loss_and_sums`, and the gradient of its loss.
    """
    rows = _Rows(target, vocabulary, logits.shape)
    log_sum, grad = sums
    _write_gradient(logits, rows, log_sum, grad.masked_fill(rows.ignored, 0), vocabulary.cap)


def _write_gradient(
    logits: Tensor, rows: _Rows, log_sum: Tensor, scale: float | Tensor, cap: float | None = None
) -> None:
    """Overwrite ``logits`` with (softmax - onehot) * scale; ``scale`` is a scalar or [t]."""
    if cap is None and (fused := _kernels(logits)):
        fused.logits_to_grad_(logits, rows.target, log_sum, rows.first, rows.columns, scale)
        return
    _squash(logits, cap)
    rows.hide_padding(logits)
    for part in _parts(logits):
        values = logits[part]
        prob = values.to(_wide(values.dtype), copy=True)
        prob.sub_(log_sum[part].unsqueeze(-1)).exp_()
        index = rows.index[part]
        is_mine = index >= 0 if rows.is_mine is None else rows.is_mine[part].unsqueeze(-1)
        prob.scatter_add_(-1, index, -is_mine.to(prob.dtype))
        prob.mul_(scale[part].unsqueeze(-1) if isinstance(scale, Tensor) else scale)
        if cap is not None:  # padding is -inf, and its probability 0
            prob.mul_(1 - (values.to(prob.dtype) / cap).square_().clamp_max_(1))
        values.copy_(prob)


def _squash(logits: Tensor, cap: float | None) -> Tensor:
    """Apply the model's soft cap in place."""
    return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


def _own_sums(logits: Tensor, rows: _Rows, tokens: slice) -> tuple[Tensor, Tensor]:
    """Return the log-sum-exp over this rank's columns and the target's logit, for ``tokens``."""
    if fused := _kernels(logits):
        sums: tuple[Tensor, Tensor]
        sums = fused.own_sums(logits, rows.target[tokens], rows.first, rows.columns)
        return sums
    rows.hide_padding(logits)
    log_sum = logits.new_empty(logits.shape[0], dtype=_wide(logits.dtype))
    for part in _parts(logits):
        values = logits[part].to(log_sum.dtype, copy=True)
        # Without columns the highest is -inf, which is not to be subtracted from itself.
        highest = values.amax(-1).clamp_min(torch.finfo(values.dtype).min)
        total = values.sub_(highest.unsqueeze(-1)).exp_().sum(-1)
        log_sum[part] = total.log_().add_(highest)
    return log_sum, rows.at_target(logits, tokens).to(log_sum.dtype)


def _sum_over_ranks(log_sum: Tensor, at_target: Tensor, group: ProcessGroup) -> Tensor:
    """Return the log-sum-exp over all ranks; ``at_target`` becomes the target's logit."""
    if group.size() == 1:
        return log_sum
    highest = log_sum.clone()
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
    both = torch.stack([(log_sum - highest).exp(), at_target])
    dist.all_reduce(both, group=group)
    at_target.copy_(both[1])
    return highest + both[0].log()


def loss_and_sums(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    vocabulary: VocabularyPart,
    *,
    bias: Tensor | None = None,
    rows_at_a_time: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return the loss and the log-sum-exp of each token, without a gradient.

    Logits exist for ``rows_at_a_time`` tokens at a time (0: for a few); the cap is applied to them.
    Collective over the group.
    """
    rows = _Rows(target, vocabulary, (len(x), len(weight)))
    step = rows_at_a_time or _ROWS_WITHOUT_GRADIENT
    sums = [
        _own_sums(_squash(F.linear(x[part], weight, bias), vocabulary.cap), rows, part)
        for part in (slice(i, i + step) for i in range(0, x.shape[0], step))
    ]
    log_sum, at_target = torch.cat([s for s, _ in sums]), torch.cat([a for _, a in sums])
    log_sum = _sum_over_ranks(log_sum, at_target, vocabulary.group)
    return (log_sum - at_target).masked_fill_(rows.ignored, 0), log_sum

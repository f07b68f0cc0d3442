"""What layers with a recurrent state share: a short convolution, shards, states of generation.

``s`` tokens, ``b`` sequences, ``c`` channels, ``w`` taps of the convolution.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron.core import device
from megatron.core.autograd import Context, Function
from megatron.core.packed_seq_params import PackedSeqParams, sequence_index
from megatron.core.parallel.context_parallel_partition import row_lengths
from megatron.core.params.param_init import Init, InitMethod, new_parameter, param_info_for
from megatron.core.transformer.kv_cache import KVCache, State
from megatron.core.transformer.module import MegatronModule

_VALUES_AT_ONCE = 1 << 16  # of a convolution on a CPU: several copies fit its cache


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    before: Tensor | None = None,
    sequence: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Convolve x [s, b, c] with weight [c, 1, w], add bias [c], if any, and apply SiLU.

    Returns [s, b, c] and the last w - 1 inputs, which are ``before`` [w - 1, b, c] (default: zeros)
    of the next call in generation.  ``sequence`` [s]: index of each token's packed sequence; the
    convolution does not mix sequences.
    """
    width = weight.shape[-1]
    if before is None:
        before = x.new_zeros(width - 1, *x.shape[1:])
    before = before.to(x.dtype)
    if sequence is not None:  # the inputs in ``before`` belong to the first sequence
        sequence = torch.cat([sequence[:1].expand(width - 1), sequence])
    last = torch.cat([before[len(x) :], x[max(0, len(x) - width + 1) :]])
    return _Conv.apply(x, before, weight, bias, sequence), last


class _Conv(Function[Tensor]):
    """SiLU of the convolution of x [s, b, c]: sums shifted views of the inputs.

    Tokens are computed in blocks that fit a CPU's cache.  Backward computes the convolution again.
    """

    @staticmethod
    def forward(
        ctx: Context[None],
        x: Tensor,
        before: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        sequence: Tensor | None,
    ) -> Tensor:
        inputs = torch.cat([before, x])
        ctx.save_for_backward(inputs, weight, bias, sequence)
        y = torch.empty_like(inputs[len(before) :])
        taps = weight[:, 0].t().contiguous()
        for rows in _row_blocks(y):
            y[rows] = F.silu(_convolved(inputs, taps, bias, sequence, rows))
        return y

    @staticmethod
    def backward(ctx: Context[None], grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight, bias, sequence = ctx.saved_tensors
        last = weight.shape[-1] - 1
        taps = weight[:, 0].t().contiguous()
        d_inputs = torch.zeros_like(inputs)
        d_taps, d_bias = torch.zeros_like(taps), torch.zeros_like(taps[0])
        for rows in _row_blocks(grad):
            y = _convolved(inputs, taps, bias, sequence, rows)
            d_y = torch.ops.aten.silu_backward(grad[rows], y)
            d_bias += d_y.flatten(0, 1).sum(0)
            for tap in range(last + 1):
                at = slice(rows.start + tap, rows.start + tap + len(d_y))
                arrived = _visible(d_y, sequence, tap, last, rows.start)
                d_inputs[at].addcmul_(arrived, taps[tap])
                d_taps[tap] += (arrived * inputs[at]).flatten(0, 1).sum(0)
        d_weight = d_taps.t().unsqueeze(1)
        d_before, d_x = d_inputs[:last], d_inputs[last:]
        return d_x, d_before, d_weight, None if bias is None else d_bias, None


def _row_blocks(y: Tensor) -> Iterator[slice]:
    """Yield slices of the tokens of y [s, b, c]: all on a GPU, or as many as a cache holds."""
    step = len(y) if device.is_cuda(y.device) else max(1, _VALUES_AT_ONCE // y[0].numel())
    for start in range(0, len(y), max(1, step)):
        yield slice(start, min(start + step, len(y)))


def _convolved(
    inputs: Tensor, taps: Tensor, bias: Tensor | None, sequence: Tensor | None, rows: slice
) -> Tensor:
    """Return the convolution of ``rows`` of the output; ``taps``: the weight as [w, c]."""
    last = len(taps) - 1
    own = inputs[rows.start + last : rows.stop + last], taps[last]
    y = torch.mul(*own) if bias is None else torch.addcmul(bias, *own)
    for tap in range(last):
        seen = inputs[rows.start + tap : rows.stop + tap]
        y.addcmul_(_visible(seen, sequence, tap, last, rows.start), taps[tap])
    return y


def _visible(x: Tensor, sequence: Tensor | None, tap: int, last: int, start: int) -> Tensor:
    """Return ``x`` [s, b, c] with zeros where a token's input ``tap`` is of another sequence.

    ``start``: index of the first token of ``x``.
    """
    if sequence is None or tap == last:
        return x
    theirs, own = (sequence[start + at : start + at + len(x)] for at in (tap, last))
    return x.masked_fill((theirs != own)[:, None, None], 0)


class RecurrentMixer(MegatronModule, ABC):
    """Base class of mixers whose state passes from token to token, with heads sharded over tp."""

    has_scan = True  # `make_batch_invariant` refuses it
    layer_number: int
    tp_group: ProcessGroup
    cp_group: ProcessGroup

    @abstractmethod
    def _scan(
        self, rows: State, sequence: Tensor | None, past: State | None = None
    ) -> tuple[Tensor, State]:
        """Mix tokens from the state ``past`` or zeros: tensors [s, b, ..] -> [s, b, i].

        Also returns the last inputs of the convolution [w - 1, b, c] and the state [b, ..] of the
        recurrence, with which the next tokens start.
        """

    def sharded(
        self, shape: tuple[int, ...], init: InitMethod, blocks: tuple[int, ...] = (1,)
    ) -> nn.Parameter:
        """Create a parameter whose first dimension is sharded over tensor-parallel ranks."""
        local = shape[0] // self.tp_group.size(), *shape[1:]
        info = param_info_for(shape, init, over=self.tp_group, blocks=blocks)
        return new_parameter(local, self.config.params_dtype, info)

    def sequences(
        self, num_local: int, packed: PackedSeqParams | None
    ) -> tuple[tuple[int, ...], Tensor | None]:
        """Return the lengths of a row's sequences, and the index of each token's if several."""
        num_tokens = num_local * self.cp_group.size()
        lengths = row_lengths(packed.lengths if packed else None, num_tokens)
        if packed is None or len(lengths) == 1:
            return lengths, None
        return lengths, sequence_index(packed.ends, num_tokens)

    def scan(self, rows: State, sequence: Tensor | None, cache: KVCache | None) -> Tensor:
        """Mix sequences from their beginning, or from the states in ``cache``: [s, b, i]."""
        if cache is None:
            return self._scan(rows, sequence)[0]

        def step(rows: State, state: State | None) -> tuple[Tensor, State]:
            past = None if state is None else (state[0].transpose(0, 1), state[1])
            y, (before, last) = self._scan(rows, None, past)
            return y, (before.transpose(0, 1), last)

        return cache.scan(self.layer_number - 1, rows, step)


class CausalConv(nn.Module):
    """Parameters of a mixer's convolution: weight [c/tp, 1, w] and, unless left out, bias [c/tp].

    ``channels``: those of each projection that it convolves.
    """

    def __init__(
        self, mixer: RecurrentMixer, channels: tuple[int, ...], width: int, *, bias: bool = True
    ) -> None:
        super().__init__()
        init = Init("uniform", width**-0.5)
        self.weight = mixer.sharded((sum(channels), 1, width), init, blocks=channels)
        self.bias = mixer.sharded((sum(channels),), init, blocks=channels) if bias else None

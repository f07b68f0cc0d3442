"""Manifold-constrained hyper-connections (mHC): n residual streams in place of one.

Source: arXiv 2512.24880, with the formulas of DeepSeek-V4 in transformers.  A sublayer reads a
weighted sum of the streams.  Then a doubly stochastic matrix mixes the streams, and each of them
receives the sublayer's output times a weight.  All weights are functions of the token's normalized
streams.  The embedding is copied into every stream; a last weighted sum precedes the final norm.

The streams of a token lie side by side: [s, b, n h], or [s/tp, b, n h] under sequence parallelism.
Parameters are replicated over tensor-parallel ranks; there is no communication.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.params.param_init import Init, InitMethod, new_parameter, param_info_for
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from megatron.core.transformer.transformer_config import TransformerConfig

R = TypeVar("R")
EPSILON = 1e-6  # added to weights and to the sums that divide them


class RecomputedStreams:
    """Streams that are freed after forward, from some sublayers on, and recomputed for backward.

    Saved are the streams at the start and the outputs of the sublayers.  `total` ends the series
    and returns its streams, which stay.
    """

    def __init__(self, start: Tensor) -> None:
        self.streams = start
        self._steps: list[CheckpointWithoutOutput] = []

    def run(self, function: Callable[..., R], *args: Tensor) -> R:
        """Compute the next step."""
        step = CheckpointWithoutOutput()
        self._steps.append(step)
        return step.checkpoint(function, *args)

    def total(self) -> Tensor:
        """Return the streams; free all that precedes them."""
        *freed, _ = self._steps
        if self.streams.requires_grad:
            for step in freed:
                step.discard_output()

            def recompute(_grad: Tensor) -> None:
                for step in freed:  # in this order: each reads results of earlier ones
                    step.recompute()

            self.streams.register_hook(recompute)
        return self.streams


class HyperConnection(nn.Module):
    """Reads the residual streams for a sublayer, and writes its output into them.

    With ``only_reads`` it joins the streams at the end of the model.
    """

    def __init__(self, config: TransformerConfig, *, only_reads: bool = False) -> None:
        super().__init__()
        n = self.num_streams = config.mhc_num_residual_streams
        self.sizes = (n,) if only_reads else (n, n, n * n)  # weights to read, to write and to mix
        self.num_iterations = config.mhc_sinkhorn_iterations
        self.eps = config.layernorm_epsilon
        self.recomputes = config.mhc_recompute_layer_num is not None

        def parameter(init: InitMethod, *shape: int) -> nn.Parameter:
            info = param_info_for(shape, init, sequence_parallel=config.sequence_parallel)
            return new_parameter(shape, config.params_dtype, info)

        gate = partial(nn.init.constant_, val=config.mhc_init_gating_factor)
        self.weight = parameter(config.init_method, sum(self.sizes), config.residual_width)
        self.bias = parameter(Init("zeros"), sum(self.sizes))
        self.scale = parameter(gate, len(self.sizes))

    def read(
        self, stream: Tensor | RecomputedStreams
    ) -> tuple[Tensor, Callable[[Tensor], Tensor | RecomputedStreams]]:
        """Return a sublayer's input [s, b, h], and a function that writes its output [s, b, h]."""
        chain: RecomputedStreams | None = None
        if isinstance(stream, RecomputedStreams):
            chain = stream
        elif self.recomputes and self.training and torch.is_grad_enabled():
            chain = RecomputedStreams(stream)
        streams = stream if isinstance(stream, Tensor) else stream.streams
        hidden, *weights = chain.run(self, streams) if chain else self(streams)

        def write(output: Tensor) -> Tensor | RecomputedStreams:
            arguments = output, streams, *weights
            if chain is None:
                return self.mix(*arguments)
            chain.streams = chain.run(self.mix, *arguments)
            return chain

        return hidden, write

    def forward(self, streams: Tensor) -> tuple[Tensor, ...]:
        """Return the sublayer's input [s, b, h] and the weights to write [s, b, n] and mix.

        The matrix [s, b, n, n] has the stream that is read first.  Weights are at least float32.
        """
        wide = streams.to(torch.promote_types(streams.dtype, torch.float32))
        logits = F.linear(wide, self.weight.to(wide.dtype))
        logits = logits * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        parts = logits.split(self.sizes, -1), self.scale, self.bias.split(self.sizes)
        read, *others = (part * scale + bias for part, scale, bias in zip(*parts, strict=True))
        apart = wide.unflatten(-1, (self.num_streams, -1))
        read = (read.sigmoid() + EPSILON).unsqueeze(-2)
        hidden: Tensor = (read @ apart).squeeze(-2).to(streams.dtype)
        if not others:
            return (hidden,)
        write, mix = others
        return hidden, 2 * write.sigmoid(), self._doubly_stochastic(mix)

    def mix(self, output: Tensor, streams: Tensor, write: Tensor, mix: Tensor) -> Tensor:
        """Return the mixed streams plus the sublayer's ``output`` [s, b, h] in each of them."""
        apart = streams.unflatten(-1, (self.num_streams, -1))
        added = write.to(streams.dtype).unsqueeze(-1) * output.unsqueeze(-2)
        mixed: Tensor = added + mix.to(streams.dtype).transpose(-1, -2) @ apart
        return mixed.flatten(-2)

    def _doubly_stochastic(self, logits: Tensor) -> Tensor:
        """Return matrices [.., n, n] whose rows and columns sum to 1 (Sinkhorn-Knopp)."""
        n = self.num_streams
        mix: Tensor = logits.unflatten(-1, (n, n)).softmax(-1) + EPSILON
        mix = mix / (mix.sum(-2, keepdim=True) + EPSILON)
        for _ in range(self.num_iterations - 1):
            mix = mix / (mix.sum(-1, keepdim=True) + EPSILON)
            mix = mix / (mix.sum(-2, keepdim=True) + EPSILON)
        return mix

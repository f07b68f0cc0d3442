"""--pipeline-split auto: stages that take equally long, as far as whole layers allow.

Costs are the FLOPs of a token, forward and backward, from `flops`: layers by their own shapes, the
loss by its product with the vocabulary.  The embedding multiplies nothing; it moves its output and
that one's gradient through memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

from megatron.training.config.run import RunConfig
from megatron.training.estimates.flops import FORWARD_AND_BACKWARD, MULTIPLY_ADD, layer_flops

_EMBEDDING_BYTES_PER_CHANNEL = 12  # output and gradient, written, read and added in 16 bits
_FLOPS_PER_BYTE = 300  # that an accelerator computes in the time of moving one


def resolve_pipeline_split(config: RunConfig, padded_vocab_size: int) -> RunConfig:
    """``config`` with its automatic split written out as a layout."""
    model, num_stages = config.model, config.placement.num_stages
    layers, embedding, loss = costs(config, padded_vocab_size)
    sizes = balanced_sizes(layers, num_stages, first=embedding, last=loss)
    layout = "|".join("t" * size for size in sizes)
    layout = f"E{layout}{'m' * (model.mtp_num_layers or 0)}L"
    settled = replace(model, pipeline_split="even", pipeline_model_parallel_layout=layout)
    return replace(config, model=settled)


def costs(config: RunConfig, padded_vocab_size: int) -> tuple[list[float], float, float]:
    """Relative time of each layer, of the embedding, and of the loss with what predicts ahead."""
    model = config.model
    again = 4 / 3 if model.recompute_granularity == "full" else 1.0
    every = [again * flops for flops in layer_flops(config)]
    num_layers = len(every) - (model.mtp_num_layers or 0)
    layers, ahead = every[:num_layers], every[num_layers:]
    scale = FORWARD_AND_BACKWARD * MULTIPLY_ADD * model.hidden_size
    loss = scale * (padded_vocab_size + len(ahead) * (padded_vocab_size + 2 * model.hidden_size))
    embedding = _EMBEDDING_BYTES_PER_CHANNEL * _FLOPS_PER_BYTE * model.hidden_size
    return layers, float(embedding), loss + sum(ahead, 0.0)


def balanced_sizes(
    layers: Sequence[float], num_stages: int, *, first: float = 0.0, last: float = 0.0
) -> list[int]:
    """How many layers, in order, each stage takes: the slowest stage as fast as can be.

    ``first`` and ``last`` are what the first and the last stage do besides; they alone may have
    no layer.  Of equally fast ways the one with the least sum of squares.
    """
    extras = [0.0] * num_stages
    extras[0] += first
    extras[-1] += last
    items = [*layers, first, last]
    surely_enough = sum(items) / num_stages + max(items) + first + last
    slowest, _ = _best_split(layers, extras, surely_enough, max)
    return _best_split(layers, extras, slowest, lambda squares, cost: squares + cost * cost)[1]


def _best_split(
    layers: Sequence[float],
    extras: Sequence[float],
    limit: float,
    join: Callable[[float, float], float],
) -> tuple[float, list[int]]:
    """Of the splits whose stages cost at most ``limit``: the least ``join`` over their costs.

    ``extras`` is what each stage costs besides its layers.
    """
    sums = [0.0, *accumulate(layers)]
    inner = range(1, len(extras) - 1)
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}  # layers dealt out -> the best way
    for stage, extra in enumerate(extras):
        following: dict[int, tuple[float, list[int]]] = {}
        for begin, (joined, sizes) in best.items():
            for end in range(begin + (stage in inner), len(sums)):
                cost = extra + sums[end] - sums[begin]
                if cost > limit * (1 + 1e-9):
                    break
                value = join(joined, cost)
                if end not in following or value < following[end][0]:
                    following[end] = (value, [*sizes, end - begin])
        best = following
    return best[len(layers)]

"""Settings that the program chooses by estimates of time and memory.

--pipeline-split auto: split the layers into pipeline stages of nearly equal time.  Costs are FLOPs
per token, forward and backward, from `flops`: layers by their own shapes, the loss by its GEMM with
the vocabulary.  The embedding has no GEMM; its cost is the memory traffic of its output and of the
output's gradient.  An encoder of images is on the first stage.

Without --loss-chunk-size: compute the loss in chunks of tokens if the logits, the one tensor that
grows with the vocabulary, would take more than a tenth of the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

from megatron.training.config.run import RunConfig
from megatron.training.estimates.flops import (
    MULTIPLY_ADD,
    gemms_per_weight,
    image_flops,
    layer_flops,
)

_EMBEDDING_BYTES_PER_CHANNEL = 12  # output and gradient, written, read and added in 16 bits
_FLOPS_PER_BYTE = 300  # FLOPs of an accelerator in the time that moving a byte takes


def resolve_pipeline_split(config: RunConfig, padded_vocab_size: int) -> RunConfig:
    """Return ``config`` with the automatic split written as a pipeline layout."""
    model, num_stages = config.model, config.placement.num_stages
    layers, first, loss = costs(config, padded_vocab_size)
    sizes = balanced_sizes(layers, num_stages, first=first, last=loss)
    layout = "|".join("t" * size for size in sizes)
    layout = f"E{layout}{'m' * (model.mtp_num_layers or 0)}L"
    settled = model.changed(pipeline_split="even", pipeline_model_parallel_layout=layout)
    return replace(config, model=settled)


def costs(config: RunConfig, padded_vocab_size: int) -> tuple[list[float], float, float]:
    """Return the relative times of each layer, of what precedes them, and of the loss with MTP.

    The embedding precedes them, and an encoder of images, which every context-parallel rank runs
    on all images of its rows.
    """
    model = config.model
    again = 4 / 3 if model.recompute_granularity == "full" else 1.0
    every = [again * flops for flops in layer_flops(config)]
    num_layers = len(every) - model.num_layers_ahead
    layers, ahead = every[:num_layers], every[num_layers:]
    scale = gemms_per_weight(config) * MULTIPLY_ADD * model.hidden_size
    heads = (model.mtp_num_layers or 0) * (padded_vocab_size + 2 * model.hidden_size)
    loss = scale * (padded_vocab_size + heads)
    embedding = _EMBEDDING_BYTES_PER_CHANNEL * _FLOPS_PER_BYTE * model.hidden_size
    images = model.context_parallel_size * image_flops(config).total / config.data.seq_length
    vision = config.vision
    images *= 4 / 3 if vision.recompute_vision and not vision.freeze_ViT else 1.0
    return layers, embedding + images, loss + sum(ahead, 0.0)


def balanced_sizes(
    layers: Sequence[float], num_stages: int, *, first: float = 0.0, last: float = 0.0
) -> list[int]:
    """Return the number of consecutive layers per stage that minimizes the slowest stage's time.

    ``first`` and ``last`` are additional costs of the first and the last stage; only these two may
    have no layer.  Among equally fast splits it is the one with the least sum of squared costs.
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
    """Return the least value of ``join`` over the stage costs, and the sizes that have it.

    Considers splits whose stages cost at most ``limit`` each.  ``extras``: the cost of each stage
    besides its layers.
    """
    sums = [0.0, *accumulate(layers)]
    inner = range(1, len(extras) - 1)
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}  # layers assigned -> best split
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


_SHARE_OF_ALL = 0.1
_SHARE_OF_CHUNK = 0.01
_LEAST_TOKENS = 256  # with fewer tokens the GEMM with the vocabulary is slow


def resolve_loss_chunks(config: RunConfig, padded_vocab_size: int, memory: float) -> RunConfig:
    """Return ``config`` with the chunk size for a rank with ``memory`` bytes."""
    model = config.model
    if model.loss_chunk_size is not None or model.defer_embedding_wgrad_compute:
        return config
    each = _bytes_of_token(config, padded_vocab_size)
    if logits_bytes(config, padded_vocab_size) <= _SHARE_OF_ALL * memory:
        return config
    size = max(_LEAST_TOKENS, int(_SHARE_OF_CHUNK * memory / each))
    return replace(config, model=model.changed(loss_chunk_size=size))


def chunk_line(config: RunConfig, padded_vocab_size: int) -> str | None:
    """Return the log line about chunks; None if all logits are computed at once."""
    size, tokens = config.model.loss_chunk_size, _tokens(config)
    if not size or size >= tokens:
        return None
    whole = tokens * _bytes_of_token(config, padded_vocab_size) / 2**30
    return (
        f"loss in chunks of {size} tokens: logits of all {tokens} would take {whole:.2f} GiB "
        "(--loss-chunk-size 0 keeps them whole)"
    )


def logits_bytes(config: RunConfig, padded_vocab_size: int) -> int:
    """Return the bytes of the logits of a micro-batch on one rank, those of MTP included."""
    losses = 1 + (config.model.mtp_num_layers or 0)
    return losses * _tokens(config) * _bytes_of_token(config, padded_vocab_size)


def _tokens(config: RunConfig) -> int:
    """Return the number of tokens of a micro-batch on a rank that computes the loss."""
    length = config.data.decoder_seq_length or config.data.seq_length
    return length * config.training.micro_batch_size // config.model.context_parallel_size


def _bytes_of_token(config: RunConfig, padded_vocab_size: int) -> int:
    model = config.model
    return padded_vocab_size // model.tensor_model_parallel_size * model.params_dtype.itemsize

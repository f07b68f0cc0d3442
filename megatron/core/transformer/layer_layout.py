"""Partition of the layers into virtual pipeline stages (pure arithmetic, no communication).

Hidden states pass through the virtual stages in order; `Placement` maps each stage to a rank and a
model chunk.  The first stage has the embedding, the last one the loss; every layer is in exactly
one stage.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING

from torch.distributed import ProcessGroup

from megatron.core.config.errors import ConfigError
from megatron.core.parallel.default_groups import library_call
from megatron.core.pipeline_parallel.plan import placement_of
from megatron.core.transformer.config.attention import LINEAR_VARIANTS
from megatron.core.transformer.pipeline_parallel_layer_layout import LAYOUT, parse_layout

if TYPE_CHECKING:  # which imports this module, for its rules
    from megatron.core.transformer.transformer_config import TransformerConfig

_FIRST, _LAST = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"


def layer_range(
    config: TransformerConfig, *, pp_rank: int, num_ranks: int, vp_stage: int | None = None
) -> range:
    """Return the layer indices, from 0 over the complete model, of one model chunk of a rank."""
    num_chunks = config.virtual_pipeline_model_parallel_size or 1
    placement = placement_of(config.pipeline_schedule, num_ranks, num_chunks)
    return layer_ranges(config, num_ranks)[placement.stage(pp_rank, vp_stage or 0)]


def layers_of_stage(
    config: TransformerConfig,
    pp_group: ProcessGroup,
    vp_stage: int | None = None,
    pp_rank: int | None = None,
) -> range:
    """Return the layer indices of a model chunk of this rank, or of ``pp_rank``.

    A config of one pipeline stage describes a part of a model that one rank holds completely, for
    example a vision encoder.
    """
    num_ranks = min(pp_group.size(), config.pipeline_model_parallel_size)
    rank = pp_group.rank() if pp_rank is None else pp_rank
    rank = rank if num_ranks > 1 else 0
    return layer_range(config, pp_rank=rank, num_ranks=num_ranks, vp_stage=vp_stage)


def attends_to_neighbors(num_layers: int) -> range:
    """Return the numbers, from 1, of RETRO's layers that attend to neighbors, as in Megatron-LM.

    Every third layer from the 6th on, of more than 15 layers from the 9th on; of fewer than 6
    layers the last one.
    """
    return range(min(6 if num_layers <= 15 else 9, num_layers), num_layers + 1, 3)


def is_last_stage(
    config: TransformerConfig, pp_group: ProcessGroup, vp_stage: int | None = None
) -> bool:
    """Return whether a model chunk of this rank is the last of the pipeline."""
    num_chunks = config.virtual_pipeline_model_parallel_size or 1
    placement = placement_of(config.pipeline_schedule, pp_group.size(), num_chunks)
    return placement.stage(pp_group.rank(), vp_stage or 0) == placement.num_stages - 1


@library_call()
def get_transformer_layer_offset(
    config: TransformerConfig,
    vp_stage: int | None = None,
    pp_rank: int | None = None,
    *,
    pp_group: ProcessGroup,
) -> int:
    """Return the number of layers before those of a model chunk; see `layers_of_stage`."""
    return layers_of_stage(config, pp_group, vp_stage, pp_rank).start


@library_call()
def get_num_layers_to_build(
    config: TransformerConfig,
    vp_stage: int | None = None,
    pp_rank: int | None = None,
    *,
    pp_group: ProcessGroup,
) -> int:
    """Return the number of layers of a model chunk; see `layers_of_stage`."""
    return len(layers_of_stage(config, pp_group, vp_stage, pp_rank))


def stacked_ranges(
    depths: tuple[int, int], encoder_ranks: int, *, pp_rank: int, num_ranks: int
) -> tuple[range | None, range | None]:
    """Return the layers of (encoder, decoder) on one rank, None for a stack that it does not hold.

    ``depths`` are the numbers of layers of both.  The first ``encoder_ranks`` ranks hold the
    encoder, the others the decoder; each stack is split as evenly as possible.

    >>> [stacked_ranges((2, 5), 1, pp_rank=rank, num_ranks=3)[1] for rank in range(3)]
    [None, range(0, 3), range(3, 5)]
    """
    if num_ranks == 1:
        return range(depths[0]), range(depths[1])
    is_behind = pp_rank >= encoder_ranks
    stage = pp_rank
    num_stages = encoder_ranks
    if is_behind:
        stage = pp_rank - encoder_ranks
        num_stages = num_ranks - encoder_ranks
    begin, end = (-(-depths[is_behind] * s // num_stages) for s in (stage, stage + 1))
    return (None, range(begin, end)) if is_behind else (range(begin, end), None)


@lru_cache(maxsize=8)
def layer_ranges(config: TransformerConfig, num_ranks: int) -> tuple[range, ...]:
    """Return the layers of each virtual stage.  Raises ConfigError if the flags allow no split."""
    problems = list(layout_problems(config, num_ranks))
    if config.pipeline_split == "auto":
        problems.append("--pipeline-split auto is settled where the vocabulary size is known")
    if problems:
        raise ConfigError("; ".join(problems))
    if config.pipeline_model_parallel_layout is not None:
        sizes = [stage.count("t") for stage in parse_layout(config.pipeline_model_parallel_layout)]
    else:
        sizes = _even_sizes(config, num_ranks)
    ends = list(accumulate(sizes))
    assert ends[-1] == config.num_layers, f"stages of {sizes} layers hold another number of them"
    return tuple(range(end - size, end) for size, end in zip(sizes, ends, strict=True))


def _even_sizes(config: TransformerConfig, num_ranks: int) -> list[int]:
    """Return the number of layers of each virtual stage in an even split.

    The first and last rank may have another number, given by flags.
    """
    num_chunks = config.virtual_pipeline_model_parallel_size or 1
    placement = placement_of(config.pipeline_schedule, num_ranks, num_chunks)
    counts = _slots_of_rank(config, num_ranks)
    stages = range(placement.num_stages)
    sizes = [counts[placement.location(stage)[0]] // num_chunks for stage in stages]
    sizes[0] -= config.account_for_embedding_in_pipeline_split
    sizes[-1] -= config.account_for_loss_in_pipeline_split
    return sizes


def _slots_of_rank(config: TransformerConfig, num_ranks: int) -> list[int]:
    """Return the number of layers per rank; embedding and loss count as layers if configured."""
    first, last = (
        config.num_layers_in_first_pipeline_stage,
        config.num_layers_in_last_pipeline_stage,
    )
    ends = [n for n in (first, last) if n is not None]
    middle = (_num_slots(config) - sum(ends)) // max(1, num_ranks - len(ends))
    counts = [middle] * (num_ranks - len(ends))
    return [first] * (first is not None) + counts + [last] * (last is not None)  # type: ignore


def _num_slots(config: TransformerConfig) -> int:
    accounted = config.account_for_embedding_in_pipeline_split
    return config.num_layers + accounted + config.account_for_loss_in_pipeline_split


# ---- error messages ------------------------------------------------------------------------


def has_explicit_layout(config: TransformerConfig) -> bool:
    """Return whether fields determine the layers of some stages."""
    counts = (
        config.pipeline_model_parallel_layout,
        config.num_layers_in_first_pipeline_stage,
        config.num_layers_in_last_pipeline_stage,
    )
    counts_ends = (
        config.account_for_embedding_in_pipeline_split or config.account_for_loss_in_pipeline_split
    )
    return counts_ends or any(count is not None for count in counts)


def layout_problems(config: TransformerConfig, num_ranks: int) -> Iterator[str]:
    """Yield an error message for each reason why the layers cannot be split as the flags ask."""
    first = config.num_layers_in_first_pipeline_stage
    last = config.num_layers_in_last_pipeline_stage
    of_embedding = config.account_for_embedding_in_pipeline_split
    of_loss = config.account_for_loss_in_pipeline_split
    ways = {  # flags that determine the layers of a stage; only one kind may be given
        LAYOUT: config.pipeline_model_parallel_layout is not None,
        "--pipeline-split auto": config.pipeline_split == "auto",
        _LAST if first is None else _FIRST: first is not None or last is not None,
        f"--account-for-{'embedding' if of_embedding else 'loss'}-in-pipeline-split": (
            of_embedding or of_loss
        ),
    }
    choices = [flag for flag, is_given in ways.items() if is_given]
    if len(choices) > 1:
        yield f"{', '.join(choices)} each say which layers a stage has: give one of them"
    elif config.pipeline_model_parallel_layout is not None:
        yield from _string_problems(config, num_ranks)
    elif config.pipeline_split == "auto":
        num_stages = num_ranks * (config.virtual_pipeline_model_parallel_size or 1)
        if config.num_layers < num_stages - 2:
            yield (
                f"--num-layers {config.num_layers} are too few for {num_stages} pipeline stages, "
                "of which only the first and the last may have none: use fewer stages"
            )
    else:
        yield from _even_problems(config, num_ranks)


def _even_problems(config: TransformerConfig, num_ranks: int) -> Iterator[str]:
    counts = {
        _FIRST: config.num_layers_in_first_pipeline_stage,
        _LAST: config.num_layers_in_last_pipeline_stage,
    }
    given = {flag: count for flag, count in counts.items() if count is not None}
    yield from (f"{flag} {n}: at least 1 is needed" for flag, n in given.items() if n < 1)
    slots, ends = _num_slots(config), sum(given.values())
    ranks = num_ranks - len(given)
    left = slots - ends
    if left < 0 or ranks < 0 or (left % ranks if ranks else left):
        extra = slots - config.num_layers
        counted = f" (+{extra} for embedding and loss)" if extra else ""
        less = "".join(f" less {flag} {n}" for flag, n in given.items())
        yield (
            f"--num-layers {config.num_layers}{counted}{less} cannot be split evenly over "
            f"{max(0, ranks)} pipeline ranks: change {_FIRST} or {_LAST}, or use --pipeline-split "
            "auto"
        )
        return
    num_chunks = config.virtual_pipeline_model_parallel_size or 1
    uneven = [n for n in _slots_of_rank(config, num_ranks) if n % num_chunks]
    if uneven:
        yield (
            f"{uneven[0]} layers of a pipeline rank cannot be split evenly over its {num_chunks} "
            f"virtual stages: change the number of stages, or use --pipeline-split auto"
        )


def _string_problems(config: TransformerConfig, num_ranks: int) -> Iterator[str]:
    text = config.pipeline_model_parallel_layout or ""
    try:
        stages = parse_layout(text)
    except ConfigError as error:
        yield str(error)
        return
    num_chunks, whole = config.virtual_pipeline_model_parallel_size or 1, "".join(stages)
    if len(stages) != num_ranks * num_chunks:
        yield (
            f"{LAYOUT} {text} has {len(stages)} stages, which --pipeline-model-parallel-size "
            f"{num_ranks} does not divide: write a multiple of {num_ranks}"
            if len(stages) % num_ranks
            else f"{LAYOUT} {text} has {len(stages)} stages, not {num_ranks} x {num_chunks}"
        )
    # What predicts further tokens is computed with the loss.
    end = "m" * (config.mtp_num_layers or 0) + "L"
    is_right = whole == f"E{'t' * config.num_layers}{end}" and stages[0] != ""
    if not is_right or not stages[-1].endswith(end):
        counts = ", ".join(f"{whole.count(letter)} {letter}" for letter in "EtmL")
        yield (
            f"{LAYOUT} {text} has {counts}: write one E, in the first stage, a t for each of the "
            f"{config.num_layers} layers (--num-layers), and last, in the last stage, {end} "
            "(an m for each of --mtp-num-layers, and the loss)"
        )


def has_linear_attention(config: TransformerConfig, layer_index: int) -> bool:
    """Return whether layer ``layer_index``, from 0 over the complete model, has linear attention.

    Multi-token prediction layers, which follow the decoder, are like its last layer.
    """
    if config.experimental_attention_variant not in LINEAR_VARIANTS:
        return False
    layer_index = min(layer_index, config.num_layers - 1)
    freq = config.linear_attention_freq
    if freq is None or isinstance(freq, int):
        return freq is None or (layer_index + 1) % freq != 0
    return bool(freq[layer_index])


def indexer_of_layer(config: TransformerConfig, layer_index: int) -> int:
    """Return the index of the layer whose indexer selects the keys of layer ``layer_index``.

    Multi-token prediction layers have indexers of their own.
    """
    if layer_index >= config.num_layers:
        return layer_index
    past_offset = max(layer_index + 1 - config.dsa_indexer_skip_topk_offset, 0)
    return layer_index - past_offset % config.dsa_indexer_topk_freq


def has_hash_routing(config: TransformerConfig, layer_index: int) -> bool:
    """Return whether layer ``layer_index`` is an MoE layer that routes by token id."""
    return layer_index < config.moe_num_hash_layers and has_experts(config, layer_index)


def has_experts(config: TransformerConfig, layer_index: int) -> bool:
    """Return whether layer ``layer_index``, from 0 over the complete model, is an MoE layer.

    Multi-token prediction layers, which follow the decoder, are like its last layer, or have a
    pattern.
    """
    if config.num_moe_experts is None:
        return False
    ahead = config.mtp_hybrid_override_pattern
    if ahead is not None and layer_index >= config.num_layers:
        return ahead[(layer_index - config.num_layers) % len(ahead)] == "E"
    layer_index = min(layer_index, config.num_layers - 1)
    if isinstance(config.moe_layer_freq, int):
        return layer_index % config.moe_layer_freq == 0
    return bool(config.moe_layer_freq[layer_index])

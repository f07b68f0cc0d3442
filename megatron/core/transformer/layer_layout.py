"""Which layers live on which pipeline stage: arithmetic only.

A virtual stage is (chunk, pipeline rank); activations pass through all ranks of chunk 0, then of
chunk 1, and so on.
"""

from __future__ import annotations

from megatron.core.config.errors import ConfigError
from megatron.core.transformer.transformer_config import TransformerConfig


def layers_of_rank(config: TransformerConfig, num_ranks: int) -> list[int]:
    """Number of slots (layers, and an embedding or loss that counts as one) of each rank."""
    first, last = config.decoder_first_pipeline_num_layers, config.decoder_last_pipeline_num_layers
    slots = config.num_layers
    slots += config.account_for_embedding_in_pipeline_split
    slots += config.account_for_loss_in_pipeline_split
    ends = [n for n in (first, last) if n is not None]
    middle_ranks, middle = num_ranks - len(ends), slots - sum(ends)
    if middle_ranks <= 0 or middle % middle_ranks:
        if middle_ranks == 0 and middle == 0:
            return ends
        raise ConfigError(
            f"{middle} layers cannot be cut evenly over {middle_ranks} pipeline ranks: use "
            "--decoder-first-pipeline-num-layers or --decoder-last-pipeline-num-layers"
        )
    counts = [middle // middle_ranks] * middle_ranks
    return [first] * (first is not None) + counts + [last] * (last is not None)


def layer_range(
    config: TransformerConfig, *, pp_rank: int, num_ranks: int, vp_stage: int | None = None
) -> range:
    """Indices, from 0 over the whole model, of the layers of one virtual stage."""
    num_chunks = config.virtual_pipeline_model_parallel_size or 1
    counts = layers_of_rank(config, num_ranks)
    uneven = [n for n in counts if n % num_chunks]
    if uneven:
        raise ConfigError(
            f"{uneven[0]} layers of a pipeline rank are not {num_chunks} equal chunks"
        )
    chunk, per_chunk = vp_stage or 0, [n // num_chunks for n in counts]
    start = chunk * sum(per_chunk) + sum(per_chunk[:pp_rank])
    stop = start + per_chunk[pp_rank]
    shift = int(config.account_for_embedding_in_pipeline_split)
    limit = config.num_layers
    return range(min(max(start - shift, 0), limit), min(max(stop - shift, 0), limit))

"""Flags of the generation engine and its layout, for tools that generate.  No torch."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass

from megatron.core.inference.paged_engine.options import EngineOptions
from megatron.training.arguments.options import GIVEN, add_options, read_config
from megatron.training.config.inference import InferenceConfig

_LONGEST = "inference_max_seq_length"  # the model's, unless given
_PAGE_SIZE = InferenceConfig.inference_dynamic_batching_chunk_size


@dataclass(frozen=True, kw_only=True)
class GenerationLayout:
    """Parallel sizes to generate with.  ``tensor`` None: all ranks that the others leave.

    Ranks beyond tensor x pipeline hold further replicas of the model.
    """

    tensor: int | None = None
    pipeline: int = 1
    expert: int = 1
    expert_tensor: int | None = None


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the engine and of its layout to the parser of a tool."""
    add_options({"inference": parser.add_argument_group("inference")}, InferenceConfig)
    parser.set_defaults(**{_LONGEST: None})
    layout = parser.add_argument_group("layout")
    for axis, default, what in (
        ("tensor", None, "tensor parallelism; default: all ranks that the other sizes leave"),
        ("pipeline", 1, "pipeline parallelism"),
        ("expert", 1, "expert parallelism, over replicas of the model"),
    ):
        flag = f"--{axis}-model-parallel-size"
        layout.add_argument(flag, type=int, default=default, metavar="N", help=f"Size of {what}.")
    layout.add_argument(
        "--expert-tensor-parallel-size",
        type=int,
        metavar="N",
        help="Size of tensor parallelism of experts; default: as for the other layers.",
    )


def generation_layout(args: argparse.Namespace) -> GenerationLayout:
    """Return the layout that a command line asks for."""
    return GenerationLayout(
        tensor=args.tensor_model_parallel_size,
        pipeline=args.pipeline_model_parallel_size,
        expert=args.expert_model_parallel_size,
        expert_tensor=args.expert_tensor_parallel_size,
    )


def engine_options(args: argparse.Namespace) -> EngineOptions:
    """Return the sizes of the engine that a command line asks for.

    Raises ConfigError for a value that is out of range.
    """
    c: InferenceConfig = read_config(InferenceConfig, args)
    given = vars(args)
    longest = given[_LONGEST] if _LONGEST in given.get(GIVEN, (_LONGEST,)) else None
    page_size = c.inference_dynamic_batching_chunk_size
    max_requests = c.inference_dynamic_batching_max_requests_override
    if max_requests is None and not c.inference_dynamic_batching:
        max_requests = c.inference_max_requests
    overflow_factor = c.inference_dynamic_batching_buffer_overflow_factor
    max_step_tokens = c.inference_dynamic_batching_max_tokens_override
    buffer_bytes = c.inference_dynamic_batching_buffer_size_gb * 2**30  # infinite above 1e299
    return EngineOptions(
        buffer_bytes=int(buffer_bytes) if buffer_bytes < sys.maxsize else sys.maxsize,
        page_size=None if page_size == _PAGE_SIZE else page_size,
        max_requests=max_requests,
        overflow_factor=1.0 if overflow_factor is None else overflow_factor,
        guaranteed_fraction=c.inference_dynamic_batching_buffer_guaranteed_fraction,
        max_step_tokens=2048 if max_step_tokens is None else max_step_tokens,
        max_sequence_length=longest,
        max_waiting=c.inference_max_waiting_requests,
        has_prefix_cache=c.inference_prefix_cache,
        num_draft_tokens=c.inference_num_draft_tokens,
        draft_model=c.inference_draft_model,
        weights=c.inference_weights,
        batch_invariant=c.inference_batch_invariant,
        kv_cache=c.inference_kv_cache_dtype,
        num_cuda_graphs=(
            0
            if c.inference_cuda_graph_scope == "none"
            else c.inference_dynamic_batching_num_cuda_graphs
        ),
        log_interval=c.inference_logging_step_interval,
        state_dtypes=(c.mamba_inference_conv_states_dtype, c.mamba_inference_ssm_states_dtype),
    )

"""Text generation."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config.option import option


@dataclass(frozen=True, kw_only=True)
class InferenceConfig:
    """Text generation."""

    inference_batch_times_seqlen_threshold: int = option(-1, "", group="inference")
    max_tokens_to_oom: int = option(12000, "", group="inference")
    output_bert_embeddings: bool = option(False, "", group="inference")
    bert_embedder_type: str = option(
        "megatron",
        "",
        group="inference",
        choices=("megatron", "huggingface"),
    )
    inference_max_requests: int = option(8, "", group="inference", dest="inference_max_batch_size")
    inference_max_seq_length: int = option(2560, "", group="inference")
    inference_dynamic_batching: bool = option(False, "", group="inference")
    inference_dynamic_batching_buffer_size_gb: float = option(40.0, "", group="inference")
    inference_dynamic_batching_chunk_size: int = option(256, "", group="inference")
    inference_dynamic_batching_buffer_guaranteed_fraction: float = option(
        0.2,
        "",
        group="inference",
    )
    inference_dynamic_batching_buffer_overflow_factor: float | None = option(
        None,
        "",
        group="inference",
    )
    inference_dynamic_batching_max_requests_override: int | None = option(
        None,
        "",
        group="inference",
    )
    inference_dynamic_batching_max_tokens_override: int | None = option(None, "", group="inference")
    inference_dynamic_batching_num_cuda_graphs: int = option(16, "", group="inference")

"""Text generation."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config import states
from megatron.core.config.option import option

_EMBEDDINGS = "training writes no vectors of texts: tools/bert_embedding.py does"


@dataclass(frozen=True, kw_only=True)
class InferenceConfig:
    """Text generation."""

    inference_batch_times_seqlen_threshold: int = option(
        -1,
        "Batch times sequence length from which generation is pipelined.",
        group="inference",
        ignored="text is written by one stage",
    )
    max_tokens_to_oom: int = option(
        12000,
        "Tokens of a request and its batch that the text server refuses to exceed.",
        group="inference",
        ignored=states.only_with("--inference-dynamic-batching"),
    )
    output_bert_embeddings: bool = option(
        False,
        "Return embeddings of BERT instead of a loss.",
        group="inference",
        ignored=_EMBEDDINGS,
    )
    bert_embedder_type: str = option(
        "megatron",
        "Which BERT embeds passages.",
        group="inference",
        choices=("megatron", "huggingface"),
        ignored=_EMBEDDINGS,
    )
    inference_max_requests: int = option(
        8,
        "Requests that are generated for at once.",
        group="inference",
        dest="inference_max_batch_size",
        ignored=states.only_with("--inference-dynamic-batching"),
    )
    inference_max_seq_length: int = option(
        2560,
        "Longest prompt and answer in tokens.",
        group="inference",
        ignored=states.only_with("--inference-dynamic-batching"),
    )
    inference_dynamic_batching: bool = option(
        False,
        "Let requests join and leave a running batch.",
        group="inference",
        refused=states.SERVING,
    )
    inference_dynamic_batching_buffer_size_gb: float = option(
        40.0,
        "Gigabytes of the cache of keys and values.",
        group="inference",
        ignored=states.only_with("--inference-dynamic-batching"),
    )
    inference_dynamic_batching_chunk_size: int = option(
        256,
        "Tokens in one block of the cache.",
        group="inference",
        ignored=states.only_with("--inference-dynamic-batching"),
    )
    inference_dynamic_batching_buffer_guaranteed_fraction: float = option(
        0.2,
        "Share of the cache kept so that running requests can finish.",
        group="inference",
        ignored=states.only_with("--inference-dynamic-batching"),
    )
    inference_dynamic_batching_buffer_overflow_factor: float | None = option(
        None,
        "Requests accepted beyond the cache, as a factor.",
        group="inference",
        ignored=states.only_with("--inference-dynamic-batching"),
    )
    inference_dynamic_batching_max_requests_override: int | None = option(
        None,
        "Largest number of running requests.",
        group="inference",
        ignored=states.only_with("--inference-dynamic-batching"),
    )
    inference_dynamic_batching_max_tokens_override: int | None = option(
        None,
        "Largest number of tokens in one step.",
        group="inference",
        ignored=states.only_with("--inference-dynamic-batching"),
    )
    inference_dynamic_batching_num_cuda_graphs: int = option(
        16,
        "Batch sizes that CUDA graphs are captured for.",
        group="inference",
        ignored=states.only_with("--inference-dynamic-batching"),
    )

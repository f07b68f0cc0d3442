"""Flags for text generation."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from megatron.core.config import flag_messages
from megatron.core.config.option import option

_EMBEDDINGS = "training writes no vectors of texts: tools/bert_embedding.py does"

_inference = partial(option, group="inference")
_inference_detail = partial(
    _inference, ignored=flag_messages.only_with("--inference-dynamic-batching")
)


@dataclass(frozen=True, kw_only=True)
class InferenceConfig:
    inference_batch_times_seqlen_threshold: int = _inference(
        -1,
        "Batch times sequence length from which generation is pipelined.",
        ignored="text is written by one stage",
    )
    max_tokens_to_oom: int = _inference_detail(
        12000, "Tokens of a request and its batch that the text server refuses to exceed."
    )
    output_bert_embeddings: bool = _inference(
        False, "Return embeddings of BERT instead of a loss.", ignored=_EMBEDDINGS
    )
    bert_embedder_type: str = _inference(
        "megatron",
        "Which BERT embeds passages.",
        choices=("megatron", "huggingface"),
        ignored=_EMBEDDINGS,
    )
    inference_max_requests: int = _inference_detail(
        8, "Requests that are generated for at once.", dest="inference_max_batch_size"
    )
    inference_max_seq_length: int = _inference_detail(2560, "Longest prompt and answer in tokens.")
    inference_dynamic_batching: bool = _inference(
        False, "Let requests join and leave a running batch.", refused=flag_messages.SERVING
    )
    inference_dynamic_batching_buffer_size_gb: float = _inference_detail(
        40.0, "Gigabytes of the cache of keys and values."
    )
    inference_dynamic_batching_chunk_size: int = _inference_detail(
        256, "Tokens in one block of the cache."
    )
    inference_dynamic_batching_buffer_guaranteed_fraction: float = _inference_detail(
        0.2, "Share of the cache kept so that running requests can finish."
    )
    inference_dynamic_batching_buffer_overflow_factor: float | None = _inference_detail(
        None, "Requests accepted beyond the cache, as a factor."
    )
    inference_dynamic_batching_max_requests_override: int | None = _inference_detail(
        None, "Largest number of running requests."
    )
    inference_dynamic_batching_max_tokens_override: int | None = _inference_detail(
        None, "Largest number of tokens in one step."
    )
    inference_dynamic_batching_num_cuda_graphs: int = _inference_detail(
        16, "Batch sizes that CUDA graphs are captured for."
    )

"""Flags for text generation."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias

from megatron.core.config import flag_messages
from megatron.core.config.option import option

DraftKind: TypeAlias = Literal["ngram", "mtp", "heads"]
WeightFormat: TypeAlias = Literal["saved", "bf16", "int8"]
KVFormat: TypeAlias = Literal["auto", "bf16", "int8"]
_EMBEDDINGS = "training writes no vectors of texts: tools/bert_embedding.py does"

_inference = partial(option, group="inference")
_engine = partial(_inference, ignored=flag_messages.GENERATION)


@dataclass(frozen=True, kw_only=True)
class InferenceConfig:
    """Flags of the generation engine; training accepts them without effect.

    Reinforcement learning reads the size of the KV cache.
    """

    inference_batch_times_seqlen_threshold: int = _inference(
        -1,
        "Batch times sequence length from which generation is pipelined.",
        at_least=-1,
        ignored="pipeline stages always work on different requests at the same time",
    )
    max_tokens_to_oom: int = _engine(
        12000, "Maximum number of tokens of one call of the server's /api, prompts and answers."
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
    inference_max_requests: int = _engine(
        8,
        "Maximum number of requests that run at the same time; not with "
        "--inference-dynamic-batching.",
        dest="inference_max_batch_size",
        at_least=1,
    )
    inference_max_seq_length: int = _engine(
        2560,
        "Maximum number of tokens of a request, prompt and answer; tools and server: the model's "
        "length by default.",
        at_least=1,
    )
    inference_dynamic_batching: bool = _engine(
        False,
        "Let the size of the KV cache limit the requests that run at the same time, not "
        "--inference-max-requests.",
    )
    inference_dynamic_batching_buffer_size_gb: float = _inference(
        40.0,
        "Maximum size of the KV cache of a rank in GB (2^30 bytes), also in rollouts of "
        "--perform-rl-step.",
    )
    inference_dynamic_batching_chunk_size: int = _engine(
        256,
        "Number of tokens of a page of the KV cache; the default is 16 on a CPU.",
        aliases=("--inference-dynamic-batching-block-size",),
        at_least=1,
    )
    inference_dynamic_batching_buffer_guaranteed_fraction: float = _engine(
        0.2, "Fraction of the KV cache that is reserved for running requests when others start."
    )
    inference_dynamic_batching_buffer_overflow_factor: float | None = _engine(
        None,
        "Number of requests that run at the same time, relative to the number of requests of "
        "--inference-max-seq-length tokens that the KV cache holds; default: 1.",
    )
    inference_dynamic_batching_max_requests_override: int | None = _engine(
        None,
        "Maximum number of requests that run at the same time.",
        aliases=("--inference-dynamic-batching-max-requests",),
        at_least=1,
    )
    inference_dynamic_batching_max_tokens_override: int | None = _engine(
        None,
        "Maximum number of tokens of a forward pass; default: 2048.",
        aliases=("--inference-dynamic-batching-max-tokens",),
        at_least=1,
    )
    inference_dynamic_batching_num_cuda_graphs: int = _engine(
        16,
        "Number of batch sizes for which decoding on a GPU is captured as a CUDA graph; 0: none, "
        "-1: all. On a CPU decoding is recorded and replayed unless it is 0.",
        at_least=-1,
    )
    inference_max_waiting_requests: int = _engine(
        1024, "Maximum number of requests that wait for their start; the server answers 429 then."
    )
    inference_cuda_graph_scope: str | None = _engine(
        None,
        "none: capture no CUDA graphs of decoding; layer and block both capture the complete "
        "forward pass, the default.",
        choices=("none", "layer", "block"),
    )
    inference_logging_step_interval: int = _inference(
        0,
        "Steps of the engine between lines about its requests and KV cache, also in rollouts of "
        "--perform-rl-step; 0: no lines.",
    )
    mamba_inference_conv_states_dtype: str | None = _engine(
        None,
        "Type in which the engine keeps the last inputs of the convolution of Mamba layers; "
        "default: that of the computation.",
        choices=("bf16", "fp16", "fp32"),
    )
    mamba_inference_ssm_states_dtype: str | None = _engine(
        None,
        "Type in which the engine keeps the states of Mamba layers; default: that of the "
        "computation.",
        choices=("bf16", "fp16", "fp32"),
    )
    inference_prefix_cache: bool = _engine(
        True,
        "Compute a beginning that several prompts share only once, the default.",
        flag="--inference-prefix-cache",
        aliases=("--inference-dynamic-batching-prefix-caching",),
        both_ways=True,
    )
    inference_num_draft_tokens: int = _engine(
        0,
        "Number of tokens that are guessed and verified in one forward pass; the generated tokens "
        "do not depend on it.",
    )
    inference_draft_model: DraftKind = _engine(
        "ngram",
        "Where the tokens of --inference-num-draft-tokens come from: what followed the same tokens "
        "in earlier text (ngram), the model's layers for multi-token prediction (mtp; see "
        "--mtp-num-layers), or its draft heads (heads; see --export-num-medusa-heads).",
        choices=("ngram", "mtp", "heads"),
        parse=str,
    )
    inference_weights: WeightFormat = _engine(
        "saved",
        "Format in which linear layers read their weights on a CPU: that of the checkpoint, or a "
        "copy in bf16 or int8 (one scale for each 128 values of a row).",
        choices=("saved", "bf16", "int8"),
        parse=str,
    )
    inference_kv_cache_dtype: KVFormat = _engine(
        "auto",
        "Format of keys and values in the KV cache: that of the model (auto), bf16, or int8 with a "
        "scale for each token and head; on a CPU only. The cache then holds more tokens.",
        choices=("auto", "bf16", "int8"),
        parse=str,
    )
    inference_batch_invariant: bool = _engine(
        False,
        "Make the bits of tokens and log-probabilities independent of the other requests of a "
        "forward pass; slower.",
    )

"""Choose whether to compute the loss in chunks of tokens, if --loss-chunk-size is not given.

Logits are the one tensor that grows with the vocabulary, and their size is known before a run.  If
they would take more than a tenth of the memory, only one chunk of them exists at a time.
"""

from __future__ import annotations

from dataclasses import replace

from megatron.training.config.run import RunConfig

_SHARE_OF_ALL = 0.1
_SHARE_OF_CHUNK = 0.01
_LEAST_TOKENS = 256  # with fewer tokens the GEMM with the vocabulary is slow


def resolve_loss_chunks(config: RunConfig, padded_vocab_size: int, memory: float) -> RunConfig:
    """Return ``config`` with the chunk size for a rank with ``memory`` bytes."""
    model = config.model
    has_whole_logits = model.defer_embedding_wgrad_compute or model.batch_invariant_mode
    if model.loss_chunk_size is not None or has_whole_logits:
        return config
    each = _bytes_of_token(config, padded_vocab_size)
    if logits_bytes(config, padded_vocab_size) <= _SHARE_OF_ALL * memory:
        return config
    size = max(_LEAST_TOKENS, int(_SHARE_OF_CHUNK * memory / each))
    return replace(config, model=replace(model, loss_chunk_size=size))


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

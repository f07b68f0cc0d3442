"""Whether the loss is computed in chunks of tokens, where --loss-chunk-size does not say it.

Logits are the one tensor that grows with the vocabulary, and that is known before a run: where
they would take more than a tenth of the memory, they are never there whole.
"""

from __future__ import annotations

from dataclasses import replace

from megatron.training.config.run import RunConfig

_SHARE_OF_ALL = 0.1
_SHARE_OF_CHUNK = 0.01
_LEAST_TOKENS = 256  # below, products with the vocabulary become slow


def resolve_loss_chunks(config: RunConfig, padded_vocab_size: int, memory: float) -> RunConfig:
    """``config`` with the chunk size that the rule gives for a rank's ``memory`` in bytes."""
    model = config.model
    if model.loss_chunk_size is not None or model.defer_embedding_wgrad_compute:
        return config
    each = _bytes_of_token(config, padded_vocab_size)
    if logits_bytes(config, padded_vocab_size) <= _SHARE_OF_ALL * memory:
        return config
    size = max(_LEAST_TOKENS, int(_SHARE_OF_CHUNK * memory / each))
    return replace(config, model=replace(model, loss_chunk_size=size))


def chunk_line(config: RunConfig, padded_vocab_size: int) -> str | None:
    """What is done, for a human; None where logits are whole."""
    size, tokens = config.model.loss_chunk_size, _tokens(config)
    if not size or size >= tokens:
        return None
    whole = tokens * _bytes_of_token(config, padded_vocab_size) / 2**30
    return (
        f"loss in chunks of {size} tokens: logits of all {tokens} would take {whole:.2f} GiB "
        "(--loss-chunk-size 0 keeps them whole)"
    )


def logits_bytes(config: RunConfig, padded_vocab_size: int) -> int:
    """Of a micro-batch on one rank, with those of tokens further ahead."""
    losses = 1 + (config.model.mtp_num_layers or 0)
    return losses * _tokens(config) * _bytes_of_token(config, padded_vocab_size)


def _tokens(config: RunConfig) -> int:
    """Of a micro-batch, on a rank that computes the loss."""
    length = config.data.decoder_seq_length or config.data.seq_length
    return length * config.training.micro_batch_size // config.model.context_parallel_size


def _bytes_of_token(config: RunConfig, padded_vocab_size: int) -> int:
    model = config.model
    return padded_vocab_size // model.tensor_model_parallel_size * model.params_dtype.itemsize

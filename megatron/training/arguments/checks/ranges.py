"""Checks of values against the range that `option()` declares, and of products of sizes."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.training.arguments.value_rules import out_of_range
from megatron.training.config.run import RunConfig

# Limits far above the largest models and devices.  A larger product is a typing error, and a much
# larger one does not fit the 64 bits of a tensor's size.
_MAX_PARAMETERS = 10**15
_MAX_ACTIVATIONS = 10**15  # values of one micro-batch in its widest tensor


def numbers_are_in_range(run: RunConfig) -> Iterator[str]:
    """Require finite values in the range of their flag.

    Usually sizes and intervals are at least 1, counts and amounts at least 0.
    """
    yield from out_of_range(run.asked)


def sizes_fit_a_machine(run: RunConfig) -> Iterator[str]:
    """Require realistic numbers of parameters and of activations in a micro-batch."""
    m, lm, seq = run.model, run.language_model, run.data.seq_length
    vocab = run.tokenizer.padded_vocab_size or run.tokenizer.vocab_size or 0
    ffn = m.ffn_hidden_size or 0
    experts = (m.num_moe_experts or 0) * (m.moe_ffn_hidden_size or 0)
    heads = m.num_attention_heads * (m.kv_channels or 0)
    positions = (lm.max_position_embeddings or 0) + vocab
    in_a_layer = m.hidden_size * (4 * heads + 3 * max(ffn, experts))
    parameters = m.num_layers * in_a_layer + positions * m.hidden_size
    if parameters > _MAX_PARAMETERS:
        yield (
            f"the model has about {parameters:.1e} parameters, more than {_MAX_PARAMETERS:.0e}: "
            "lower --hidden-size, --ffn-hidden-size, --num-layers, --num-experts or --vocab-size"
        )
    samples = run.training.micro_batch_size
    activations = samples * seq * max(m.hidden_size, ffn, heads, vocab)
    if activations > _MAX_ACTIVATIONS:
        yield (
            f"a micro-batch has about {activations:.1e} activations in one tensor, more than "
            f"{_MAX_ACTIVATIONS:.0e}: lower --micro-batch-size, --seq-length or the model's widths"
        )


def one_way_to_count_buckets(run: RunConfig) -> Iterator[str]:
    """Refuse both a number and a size of gradient buckets."""
    d = run.ddp
    if d.ddp_num_buckets is not None and d.bucket_size is not None:
        yield "--ddp-num-buckets and --ddp-bucket-size both set the bucket size: keep one"

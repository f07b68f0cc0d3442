"""How many parameters a GPT has on one tensor-parallel rank: arithmetic on the configuration."""

from __future__ import annotations

from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.config.run import RunConfig


def padded_vocab_size(run: RunConfig) -> int | None:
    """Rows of the word embedding over all ranks; None if only the tokenizer knows them."""
    t, tp = run.tokenizer, run.model.tensor_model_parallel_size
    if t.padded_vocab_size is not None:
        return t.padded_vocab_size
    if t.vocab_size is None:
        return None
    # A NullTokenizer adds its end-of-document token to --vocab-size.
    size = t.vocab_size + (1 if t.tokenizer_type == "NullTokenizer" else 0)
    multiple = run.language_model.make_vocab_size_divisible_by * tp
    return -(-size // multiple) * multiple


def layer_parameters(m: TransformerConfig) -> int:
    """Parameters of one layer on one tensor-parallel rank."""
    tp, hidden = m.tensor_model_parallel_size, m.hidden_size
    query, key_value = m.kv_channels * m.num_attention_heads, m.kv_channels * m.num_query_groups
    projections = (query + 2 * key_value) // tp
    inner = m.ffn_hidden_size // tp * (2 if m.gated_linear_unit else 1)
    weights = hidden * (projections + query // tp + inner + m.ffn_hidden_size // tp)
    biases = projections if m.add_bias_linear or m.add_qkv_bias else 0
    biases += 2 * hidden + inner if m.add_bias_linear else 0
    return weights + biases + _norm_parameters(m)


def _norm_parameters(m: TransformerConfig) -> int:
    per_channel = 2 if m.normalization == "LayerNorm" else 1
    norms = 4 if m.layer_norm_placement == "sandwich" else 2
    qk = 0
    if m.qk_layernorm_full_width:  # an RMS norm, whatever the others are
        qk = m.kv_channels * (m.num_attention_heads + m.num_query_groups)
        qk //= m.tensor_model_parallel_size
    elif m.qk_layernorm:
        qk = per_channel * 2 * m.kv_channels
    return per_channel * norms * m.hidden_size + qk


def embedding_parameters(run: RunConfig) -> int | None:
    """Word and position tables, final norm and output layer on one rank."""
    vocab, m, lm = padded_vocab_size(run), run.model, run.language_model
    if vocab is None:
        return None
    tables = 2 if lm.untie_embeddings_and_output_weights else 1
    learned = lm.position_embedding_type == "learned_absolute"
    positions = (lm.max_position_embeddings or 0) if learned else 0
    norm = 2 if m.normalization == "LayerNorm" else 1
    rows = tables * vocab // m.tensor_model_parallel_size
    return m.hidden_size * (rows + positions + norm)


def rank_parameters(run: RunConfig) -> tuple[int, bool]:
    """Parameters on one rank, and whether the vocabulary is among them."""
    layers = run.model.num_layers * layer_parameters(run.model)
    embedding = embedding_parameters(run)
    return layers + (embedding or 0), embedding is not None

"""Number of parameters of low-rank adapters, from the configuration alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megatron.core.peft.lora import WHOLE, LoraConfig, targeted_parts
from megatron.core.ssm.mixer_shape import mixer_shape
from megatron.core.transformer.heterogeneous.heterogeneous_config import FULL
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.config.run import RunConfig
from megatron.training.estimates.model_layers import layers_of
from megatron.training.models.layers import Layer

Matrices = Iterator[tuple[str, Mapping[str, int], int]]  # layer, rows of each part, columns


def adapter_parameters(run: RunConfig, padded_vocab_size: int) -> int:
    """Return the parameters of all adapters of the model; 0 without --lora-rank.

    Of layers that a heterogeneous model replaces none are counted.
    """
    config = run.adapters.lora
    if config is None:
        return 0
    m = run.model
    of_layers = sum(_count(_matrices(m, layer), config) for layer in layers_of(run))
    ahead = [("mtp.eh_proj", {WHOLE: m.hidden_size}, 2 * m.hidden_size)]
    outside: Matrices = iter(
        [
            ("embedding.word_embeddings", {WHOLE: padded_vocab_size}, m.hidden_size),
            ("output_layer", {WHOLE: padded_vocab_size}, m.hidden_size),
        ]
    )
    of_ahead = (m.mtp_num_layers or 0) * _count(iter(ahead), config)
    return of_layers + of_ahead + _count(outside, config)


def _count(matrices: Matrices, config: LoraConfig) -> int:
    total = 0
    for name, rows, columns in matrices:
        chosen = {p for t in config.targets for p in targeted_parts(t, name, tuple(rows))}
        total += sum(config.rank * (rows[part] + columns) for part in chosen)
    return total


def _matrices(m: TransformerConfig, layer: Layer) -> Matrices:
    """Yield the linear layers of a layer, by the end of their names."""
    hidden = m.hidden_size
    heads = m.num_attention_heads
    if layer.has_mixer:
        shape = mixer_shape(m)
        yield "mixer.in_proj", {WHOLE: sum(shape.projected)}, hidden
        yield "mixer.out_proj", {WHOLE: hidden}, shape.inner
    if layer.attention == FULL and m.multi_latent_attention:
        query = heads * (m.qk_head_dim + m.qk_pos_emb_head_dim)
        if m.q_lora_rank is None:
            yield "self_attention.linear_q_proj", {WHOLE: query}, hidden
        else:
            yield "self_attention.linear_q_down_proj", {WHOLE: m.q_lora_rank}, hidden
            yield "self_attention.linear_q_up_proj", {WHOLE: query}, m.q_lora_rank
        latent = m.kv_lora_rank + m.qk_pos_emb_head_dim
        yield "self_attention.linear_kv_down_proj", {WHOLE: latent}, hidden
        raised = heads * (m.qk_head_dim + m.v_head_dim)
        yield "self_attention.linear_kv_up_proj", {WHOLE: raised}, m.kv_lora_rank
        yield "self_attention.linear_proj", {WHOLE: hidden}, heads * m.v_head_dim
    elif layer.attention == FULL:
        q = m.kv_channels * heads
        k = m.kv_channels * m.num_query_groups
        yield "self_attention.linear_qkv", {"q": q, "k": k, "v": k}, hidden
        yield "self_attention.linear_proj", {WHOLE: hidden}, q
    if layer.has_experts:
        for _ in range(m.num_moe_experts or 0):
            yield from _mlp("mlp.experts", m, m.moe_ffn_hidden_size or 0)
        if m.moe_shared_expert_intermediate_size:
            yield from _mlp("mlp.shared_experts", m, m.moe_shared_expert_intermediate_size)
    elif layer.mlp == FULL:
        yield from _mlp("mlp", m, layer.ffn_hidden_size)


def _mlp(name: str, m: TransformerConfig, width: int) -> Matrices:
    rows = {"gate": width, "up": width} if m.gated_linear_unit else {WHOLE: width}
    yield f"{name}.linear_fc1", rows, m.hidden_size
    yield f"{name}.linear_fc2", {WHOLE: m.hidden_size}, width

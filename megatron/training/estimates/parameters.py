"""Number of parameters of a model, and of its adapters, from the configuration alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megatron.core.peft.lora import WHOLE, LoraConfig, targeted_parts
from megatron.core.ssm.mamba_hybrid_layer_allocation import mixer_shape
from megatron.core.transformer.heterogeneous.heterogeneous_config import FULL, LINEAR
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.config.run import RunConfig
from megatron.training.models.encoders import (
    AudioEncoder,
    ImageEncoder,
    audio_encoder,
    encoders_of,
    image_encoder,
    num_patches,
    pixels_of_patch,
)
from megatron.training.models.kind import Layer
from megatron.training.models.registry import layers_of, model_kind_of


def known_padded_vocab_size(run: RunConfig) -> int | None:
    """Return the rows of the word embedding over all ranks.

    None if they depend on the tokenizer, which is not loaded.
    """
    t, tp = run.tokenizer, run.model.tensor_model_parallel_size
    if t.padded_vocab_size is not None:
        return t.padded_vocab_size
    if t.vocab_size is None:
        return None
    # A NullTokenizer adds its end-of-document token to --vocab-size.
    size = t.vocab_size + (1 if t.tokenizer_type == "NullTokenizer" else 0)
    multiple = run.language_model.make_vocab_size_divisible_by * tp
    return -(-size // multiple) * multiple


def layer_parameters(run: RunConfig) -> int:
    """Return the parameters of all layers on one tensor-parallel rank, MTP layers included."""
    m = run.model
    joining = 2 * m.hidden_size**2 + 3 * m.hidden_size * _parameters_per_channel(m)
    layers = sum(_layer_parameters(m, layer) for layer in layers_of(run))
    return (m.mtp_num_layers or 0) * joining + layers


def head_parameters(run: RunConfig, padded_vocab_size: int) -> int:
    """Return the parameters outside layers and embeddings on one tensor-parallel rank."""
    m = run.model
    hidden, tp = m.hidden_size, m.tensor_model_parallel_size
    norm = hidden * _parameters_per_channel(m)
    kind = model_kind_of(run)
    if kind.classifies_images:
        return norm + (hidden + 1) * run.image_classifier.num_classes
    if kind.has_masked_lm_head:
        has_order = run.language_model.bert_binary_head
        order = 2 * hidden + hidden * (hidden + 1) + 2 * (hidden + 1) if has_order else 0
        return norm + hidden * (hidden + 1) + norm + padded_vocab_size // tp + order
    if kind.has_encoder:
        is_relative = run.language_model.position_embedding_type == "relative"
        buckets = m.relative_attention_num_buckets if is_relative else 0
        bias = buckets * m.num_attention_heads // tp
        is_tied = not run.language_model.untie_embeddings_and_output_weights
        has_bias = is_tied and m.add_bias_linear
        return 2 * (norm + bias) + (padded_vocab_size // tp if has_bias else 0)
    return norm


def encoder_parameters(run: RunConfig) -> int:
    """Return the parameters of all encoders on one tensor-parallel rank; 0 without one.

    Those of an image classifier are its embeddings: `layer_parameters` counts its layers.
    """
    kind = model_kind_of(run)
    if kind.classifies_images:  # patches with a bias, class token, positions
        vectors = pixels_of_patch(run.vision) + num_patches(run.vision) + 3
        return run.model.hidden_size * vectors
    if not kind.reads_images:
        return 0
    images = image_encoder(run)
    m = images.layers
    hidden = images.layers.hidden_size
    layers = _encoder_layers(m) + m.num_layers * 2 * hidden * images.has_layer_scale
    norms = images.kind.has_norm_before + images.kind.has_norm_after
    places = 0 if images.kind.reads_any_size else images.num_tokens
    vectors = places + images.kind.has_class_token + images.kind.has_patch_bias
    vectors += images.pixels + norms * _parameters_per_channel(m)
    total = layers + hidden * vectors
    if run.mimo.has_sound:
        sound = audio_encoder(run)
        norm = sound.layers.hidden_size * _parameters_per_channel(sound.layers)
        total += sound.input_parameters + _encoder_layers(sound.layers) + norm
    return total


def _encoder_layers(m: TransformerConfig) -> int:
    layer = Layer(attention=FULL, mlp=FULL, ffn_hidden_size=m.ffn_hidden_size or 0)
    return m.num_layers * _layer_parameters(m, layer)


def projector_parameters(run: RunConfig) -> int:
    """Return the parameters behind the encoders on one tensor-parallel rank; 0 without one."""
    if not model_kind_of(run).reads_images:
        return 0
    return sum(_projector_parameters(run, each) for each in encoders_of(run))


def _projector_parameters(run: RunConfig, images: ImageEncoder | AudioEncoder) -> int:
    m = images.projector
    source = images.projector_input
    around = source * _parameters_per_channel(m) if images.projector_has_norm else 0
    around += m.hidden_size * bool(run.vision.grids)  # embedding of the end of a row of tiles
    if run.vision.vision_projection_type == "mlp":
        width = m.ffn_hidden_size or 0
        return around + _mlp_matrices(m, width, m.tensor_model_parallel_size, input_size=source)
    return around + m.hidden_size // m.tensor_model_parallel_size * (source + m.add_bias_linear)


def _layer_parameters(m: TransformerConfig, layer: Layer) -> int:
    total = _attention_parameters(m, layer.attention)
    total += _expert_parameters(m) if layer.has_experts else _mlp_parameters(m, layer)
    if layer.has_cross_attention:
        total += _attention_parameters(m, FULL)
    if layer.has_mixer:
        shape = mixer_shape(m)
        total += shape.num_parameters // m.tensor_model_parallel_size + _norms_of_part(m)
    return total


def _attention_parameters(m: TransformerConfig, kind: str) -> int:
    if kind != FULL:
        return _replaced(m, kind)
    tp, hidden = m.tensor_model_parallel_size, m.hidden_size
    around = _norms_of_part(m)
    if m.softmax_type == "learnable":
        around += m.num_attention_heads // tp
    if m.multi_latent_attention:
        return _latent_parameters(m) + around
    query, key_value = m.kv_channels * m.num_attention_heads, m.kv_channels * m.num_query_groups
    projections = (query + 2 * key_value) // tp
    biases = projections if m.add_bias_linear or m.add_qkv_bias else 0
    biases += hidden if m.add_bias_linear else 0
    norms = 0
    if m.qk_layernorm_full_width:  # an RMS norm, whatever the others are
        norms = m.kv_channels * (m.num_attention_heads + m.num_query_groups) // tp
    elif m.qk_layernorm:
        norms = 2 * m.kv_channels * _parameters_per_channel(m)
    return hidden * (projections + query // tp) + biases + norms + around


def _latent_parameters(m: TransformerConfig) -> int:
    heads = m.num_attention_heads // m.tensor_model_parallel_size
    hidden, query = m.hidden_size, m.qk_head_dim + m.qk_pos_emb_head_dim
    kv = hidden * (m.kv_lora_rank + m.qk_pos_emb_head_dim)
    kv += m.kv_lora_rank * heads * (m.qk_head_dim + m.v_head_dim)
    raised = (hidden if m.q_lora_rank is None else m.q_lora_rank) * heads * query
    down = hidden * (m.q_lora_rank or 0)
    bias = hidden if m.add_bias_linear else 0
    norms = m.kv_lora_rank + (m.q_lora_rank or 0) if m.qk_layernorm else 0
    out = heads * m.v_head_dim * hidden + bias
    return kv + raised + down + out + norms * _parameters_per_channel(m)


def _mlp_parameters(m: TransformerConfig, layer: Layer) -> int:
    if layer.mlp != FULL:
        return _replaced(m, layer.mlp)
    matrices = _mlp_matrices(m, layer.ffn_hidden_size, m.tensor_model_parallel_size)
    return matrices + _norms_of_part(m)


def _mlp_matrices(
    m: TransformerConfig, width: int, tp: int, *, input_size: int | None = None
) -> int:
    inner = width // tp * (2 if m.gated_linear_unit else 1)
    biases = m.hidden_size + inner if m.add_bias_linear else 0
    return (input_size or m.hidden_size) * inner + m.hidden_size * (width // tp) + biases


def _expert_parameters(m: TransformerConfig) -> int:
    """Return the parameters of an expert layer's MLP: router, local experts, shared experts."""
    assert m.num_moe_experts is not None, "called for a layer with experts"
    one = _mlp_matrices(m, m.moe_ffn_hidden_size or 0, m.expert_tensor_parallel_size or 1)
    total = (
        m.hidden_size + m.add_bias_linear
    ) * m.num_moe_experts + m.num_moe_experts // m.expert_model_parallel_size * one
    if m.moe_shared_expert_intermediate_size:
        width = m.moe_shared_expert_intermediate_size
        total += _mlp_matrices(m, width, m.tensor_model_parallel_size)
        total += m.hidden_size if m.moe_shared_expert_gate else 0
    return total + _norms_of_part(m)


def _replaced(m: TransformerConfig, kind: str) -> int:
    """Return the parameters of a part that is one matrix with a norm, or absent."""
    if kind != LINEAR:
        return 0
    return m.hidden_size**2 // m.tensor_model_parallel_size + _norms_of_part(m)


def _norms_of_part(m: TransformerConfig) -> int:
    norms = 2 if m.layer_norm_placement == "sandwich" else 1
    return norms * m.hidden_size * _parameters_per_channel(m)


def _parameters_per_channel(m: TransformerConfig) -> int:
    return 2 if m.normalization == "LayerNorm" else 1


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

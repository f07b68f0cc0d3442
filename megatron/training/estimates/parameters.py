"""Number of parameters of a model, and of its adapters, from the configuration alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from megatron.core.peft.lora import WHOLE, LoraConfig, targeted_parts
from megatron.core.ssm.mamba_hybrid_layer_allocation import delta_net_shape, mixer_shape
from megatron.core.transformer.heterogeneous.heterogeneous_config import FULL, LINEAR
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.config.run import RunConfig
from megatron.training.models.encoders import (
    MediaEncoder,
    encoders_of,
    num_patches,
    pixels_of_patch,
)
from megatron.training.models.kind import DELTA_NET, Layer
from megatron.training.models.registry import layers_of, model_kind_of

Matrices = Iterable[tuple[str, Mapping[str, int], int]]  # layer, rows of each part, columns
EXPERTS = "mlp.experts."


def known_padded_vocab_size(config: RunConfig) -> int | None:
    """Return the rows of the word embedding over all ranks.

    None if they depend on the tokenizer, which is not loaded.
    """
    t = config.tokenizer
    tp = config.model.tensor_model_parallel_size
    if t.padded_vocab_size is not None:
        return t.padded_vocab_size
    if t.vocab_size is None:
        return None
    # A NullTokenizer adds its end-of-document token to --vocab-size.
    size = t.vocab_size + (1 if t.tokenizer_type == "NullTokenizer" else 0)
    multiple = config.language_model.make_vocab_size_divisible_by * tp
    return -(-size // multiple) * multiple


def layer_parameters(config: RunConfig) -> int:
    """Return the parameters of all layers on one tensor-parallel rank, MTP layers included."""
    m = config.model
    joining = 2 * m.hidden_size**2 + 3 * m.hidden_size * _parameters_per_channel(m)
    layers = sum(_layer_parameters(m, layer) for layer in _layers_with_weights(config))
    return m.num_mtp_modules * joining + layers


def _layers_with_weights(config: RunConfig) -> list[Layer]:
    """Return all layers but those that repeat the weights of the first MTP depth."""
    m, layers = config.model, layers_of(config)
    repeated = m.num_layers_ahead // max(m.mtp_num_layers or 0, 1) * m.num_mtp_modules
    return layers[: len(layers) - m.num_layers_ahead + repeated]


def head_parameters(config: RunConfig, padded_vocab_size: int) -> int:
    """Return the parameters outside layers and embeddings on one tensor-parallel rank."""
    m = config.model
    hidden, tp = m.hidden_size, m.tensor_model_parallel_size
    norm = hidden * _parameters_per_channel(m)
    kind = model_kind_of(config)
    if kind.classifies_images:
        return norm + (hidden + 1) * config.image_classifier.num_classes
    if kind.has_masked_lm_head:
        has_order = config.language_model.bert_binary_head
        order = 2 * hidden + hidden * (hidden + 1) + 2 * (hidden + 1) if has_order else 0
        return norm + hidden * (hidden + 1) + norm + padded_vocab_size // tp + order
    if kind.has_encoder:
        is_relative = config.language_model.position_embedding_type == "relative"
        buckets = m.relative_attention_num_buckets if is_relative else 0
        bias = buckets * m.num_attention_heads // tp
        is_tied = not config.language_model.untie_embeddings_and_output_weights
        has_bias = is_tied and m.add_bias_linear
        return 2 * (norm + bias) + (padded_vocab_size // tp if has_bias else 0)
    return norm + (sum(streams_matrix(m, 1)) + 1) * m.enable_mhc_connections


def encoder_parameters(config: RunConfig) -> int:
    """Return the parameters of all encoders on one tensor-parallel rank; 0 without one.

    Those of an image classifier are its embeddings: `layer_parameters` counts its layers.
    """
    kind = model_kind_of(config)
    if kind.classifies_images:  # patches with a bias, class token, positions
        vectors = pixels_of_patch(config.vision) + num_patches(config.vision) + 3
        return config.model.hidden_size * vectors
    if not kind.reads_images:
        return 0
    total = 0
    for encoder in encoders_of(config):
        m = encoder.layers
        per_channel = encoder.num_norms * _parameters_per_channel(m)
        per_channel += 2 * m.num_layers * encoder.is_internvit
        layer = Layer(attention=FULL, mlp=FULL, ffn_hidden_size=m.ffn_hidden_size or 0)
        layers = m.num_layers * _layer_parameters(m, layer)
        total += encoder.input_parameters + layers + m.hidden_size * per_channel
    return total


def projector_parameters(config: RunConfig) -> int:
    """Return the parameters behind the encoders on one tensor-parallel rank; 0 without one."""
    if not model_kind_of(config).reads_images:
        return 0
    total = 0
    for images in encoders_of(config):
        m = images.projector
        total += _weights(m, projector_layers(config, images))
        total += images.projector_input * _parameters_per_channel(m) * images.norms_output
        added = len(config.vision.deepstack_visual_indexes)
        total += added * images.projector_input * _parameters_per_channel(m)
        total += m.hidden_size * bool(config.vision.grids)  # embedding of the end of a row of tiles
    return total


def projector_layers(config: RunConfig, images: MediaEncoder) -> Matrices:
    """Yield the linear layers of the projector after an encoder, like `linear_layers`."""
    m = images.projector
    if images.merges:
        yield "mlp.merger", {WHOLE: images.projector_input}, 4 * images.projector_input
    if config.vision.vision_projection_type == "mlp":
        for _ in range(1 + len(config.vision.deepstack_visual_indexes)):
            yield from _mlp("mlp", m, m.ffn_hidden_size or 0, images.projector_input)
    else:
        yield "mlp.linear_fc1", {WHOLE: m.hidden_size}, images.projector_input


def _layer_parameters(m: TransformerConfig, layer: Layer) -> int:
    hidden, tp = m.hidden_size, m.tensor_model_parallel_size
    per_channel = _parameters_per_channel(m)
    norms = per_channel * hidden * (2 if m.layer_norm_placement == "sandwich" else 1)
    parts = layer.attention, layer.mlp
    connection = sum(streams_matrix(m)) + 3  # bias and scales
    num_parts = parts.count(FULL) + parts.count(LINEAR) + parts.count(DELTA_NET)
    total = (norms + connection * m.enable_mhc_connections) * (num_parts + layer.has_mixer)
    total += hidden**2 // tp * parts.count(LINEAR)
    total += _weights(m, linear_layers(m, layer))
    if layer.attention == FULL:
        total += m.num_attention_heads // tp * (m.softmax_type == "learnable")
        if m.multi_latent_attention and m.qk_layernorm:
            total += (m.kv_lora_rank + (m.q_lora_rank or 0)) * per_channel
        elif m.qk_layernorm_full_width:  # an RMS norm, whatever the others are
            total += m.kv_channels * (m.num_attention_heads + m.num_query_groups) // tp
        elif m.qk_layernorm:
            total += 2 * m.kv_channels * per_channel
    total += 2 * m.dsa_indexer_head_dim * layer.has_indexer  # a LayerNorm
    if layer.has_experts:  # the router, and the gate of shared experts
        total += (hidden + m.add_bias_linear) * (m.num_moe_experts or 0)
        total += hidden * bool(m.moe_shared_expert_intermediate_size and m.moe_shared_expert_gate)
    if layer.has_cross_attention:
        total += _layer_parameters(m, Layer(attention=FULL))
    total += sum(_layer_parameters(m, inner) for inner in layer.encoder)
    if layer.has_mixer:
        total += mixer_shape(m).num_parameters // tp
    if layer.attention == DELTA_NET:
        delta = delta_net_shape(m)
        total += delta.num_sharded // tp + delta.value_width
    return total


def streams_matrix(m: TransformerConfig, kinds: int = 3) -> tuple[int, int]:
    """Return the number of weights and of rows of a matrix that computes weights of streams.

    ``kinds``: 3 for a sublayer; 1 at the end of the model, which only reads the streams.
    """
    rows = m.mhc_num_residual_streams * (1 if kinds == 1 else 2 + m.mhc_num_residual_streams)
    return rows * m.residual_width, rows


def _weights(m: TransformerConfig, layers: Matrices) -> int:
    """Return the parameters of linear layers, besides mixers', on one tensor-parallel rank."""
    total = 0
    for name, rows, columns in layers:
        is_whole = name.endswith(("_down_proj", "_latent_proj")) or ".indexer." in name
        ranks = 1 if is_whole else m.tensor_model_parallel_size
        count = 1
        if name.startswith(EXPERTS):
            ranks = m.expert_tensor_parallel_size or 1
            count = (m.num_moe_experts or 0) // m.expert_model_parallel_size
        size, bias = sum(rows.values()), 0
        if name.endswith(("linear_proj", "linear_fc2", "_latent_proj")):
            bias = size * m.add_bias_linear
        elif name.endswith("linear_fc1"):
            bias = size // ranks * m.add_bias_linear
        elif name.endswith("linear_qkv"):
            bias = size // ranks * (m.add_bias_linear or m.add_qkv_bias)
        total += (
            count
            * (size * columns // ranks + bias)
            * (".in_proj" not in name and ".out_proj" not in name)
        )
    return total


def _parameters_per_channel(m: TransformerConfig) -> int:
    return 2 if m.normalization == "LayerNorm" else 1


def adapter_parameters(run: RunConfig, padded_vocab_size: int) -> int:
    """Return the parameters of all adapters of the model; 0 without --lora-rank.

    Of layers that a heterogeneous model replaces none are counted.
    """
    config = run.adapters.lora
    if config is None:
        return 0
    m = run.model
    layers = _layers_with_weights(run)
    of_layers = sum(_count(linear_layers(m, layer), config, m) for layer in layers)
    ahead = ("mtp.eh_proj", {WHOLE: m.hidden_size}, 2 * m.hidden_size)
    outside = (
        (name, {WHOLE: padded_vocab_size}, m.hidden_size)
        for name in ("embedding.word_embeddings", "output_layer")
    )
    of_ahead = m.num_mtp_modules * _count([ahead], config, m)
    return of_layers + of_ahead + _count(outside, config, m)


def _count(matrices: Matrices, config: LoraConfig, m: TransformerConfig) -> int:
    total = 0
    for name, rows, columns in matrices:
        chosen = {p for t in config.targets for p in targeted_parts(t, name, tuple(rows))}
        count = m.num_moe_experts or 0 if name.startswith(EXPERTS) else 1
        magnitudes = sum(rows[part] for part in chosen) if config.use_dora else 0
        total += count * (magnitudes + sum(config.rank * (rows[p] + columns) for p in chosen))
    return total


def linear_layers(m: TransformerConfig, layer: Layer) -> Matrices:
    """Yield the linear layers of a layer, by the end of their names; of experts those of one.

    Without routers, cross attention and what replaces a part of a heterogeneous model.
    """
    hidden = m.hidden_size
    heads = m.num_attention_heads
    if layer.has_mixer:
        shape = mixer_shape(m)
        yield "mixer.in_proj", {WHOLE: sum(shape.projected)}, hidden
        yield "mixer.out_proj", {WHOLE: hidden}, shape.inner
    if layer.attention == DELTA_NET:
        delta = delta_net_shape(m)
        yield "self_attention.in_proj", {WHOLE: sum(delta.projected)}, hidden
        yield "self_attention.out_proj", {WHOLE: hidden}, delta.inner
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
        if layer.has_indexer:
            indexer, query = "self_attention.core_attention.indexer", m.q_lora_rank or hidden
            width = m.dsa_indexer_n_heads * m.dsa_indexer_head_dim
            yield f"{indexer}.linear_wq_b", {WHOLE: width}, query
            yield f"{indexer}.linear_wk", {WHOLE: m.dsa_indexer_head_dim}, hidden
            yield f"{indexer}.linear_weights_proj", {WHOLE: m.dsa_indexer_n_heads}, hidden
    elif layer.attention == FULL:
        q = m.kv_channels * heads
        k = m.kv_channels * m.num_query_groups
        rows = {"q": q * (1 + m.attention_output_gate), "k": k, "v": k}
        yield "self_attention.linear_qkv", rows, hidden
        yield "self_attention.linear_proj", {WHOLE: hidden}, q
    if layer.has_experts:
        if m.moe_latent_size is not None:
            yield "mlp.fc1_latent_proj", {WHOLE: m.moe_latent_size}, hidden
            yield "mlp.fc2_latent_proj", {WHOLE: hidden}, m.moe_latent_size
        ends = m.moe_latent_size or hidden
        yield from _mlp("mlp.experts", m, m.moe_ffn_hidden_size or 0, ends, ends)
        if m.moe_shared_expert_intermediate_size:
            yield from _mlp("mlp.shared_experts", m, m.moe_shared_expert_intermediate_size)
    elif layer.mlp == FULL:
        yield from _mlp("mlp", m, layer.ffn_hidden_size)


def _mlp(
    name: str,
    m: TransformerConfig,
    width: int,
    columns: int | None = None,
    outputs: int | None = None,
) -> Matrices:
    rows = {"gate": width, "up": width} if m.gated_linear_unit else {WHOLE: width}
    yield f"{name}.linear_fc1", rows, columns or m.hidden_size
    yield f"{name}.linear_fc2", {WHOLE: outputs or m.hidden_size}, width

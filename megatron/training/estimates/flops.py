"""Model FLOPs: operations in the mathematics of a training step, not those the device executes.

Counted are GEMMs (two operations per multiply-add), once forward and twice backward; for a Mamba
layer and for linear attention also the convolution, and the scan as a recurrence.  Recomputation,
norms, softmax and the optimizer are not counted.  A frozen weight has no gradient, and a part of
the model has no backward pass if nothing up to it is trained (--freeze-LM, --freeze-ViT,
--lora-rank).  Adapters are not counted.  Of images a sample has as many tiles as --seq-length has
places for.

Two counts exist:
- `num_floating_point_operations` is Megatron-LM's, for "throughput per GPU": a causal query
  attends to half of the sequence, and every token of BERT is multiplied by the vocabulary matrix.
- `causal_model_flops` is for "MFU": query i attends to exactly the i + 1 keys that the causal mask
  admits, fewer in a sliding window; only BERT's masked tokens are multiplied by that matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from megatron.core.ssm.mamba_hybrid_layer_allocation import delta_net_shape, mixer_shape
from megatron.core.transformer.attention_masks import window_of_layer
from megatron.core.transformer.config.attention import SPARSE_VARIANT
from megatron.core.transformer.heterogeneous.heterogeneous_config import FULL, LINEAR
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.config.run import RunConfig
from megatron.training.estimates.parameters import (
    EXPERTS,
    linear_layers,
    projector_layers,
    streams_matrix,
)
from megatron.training.models.encoders import (
    MediaEncoder,
    encoders_of,
    num_patches,
    pixels_of_patch,
)
from megatron.training.models.kind import DELTA_NET, Layer
from megatron.training.models.registry import layers_of, model_kind_of

FORWARD_AND_BACKWARD = 3
MULTIPLY_ADD = 2
_SCALE = FORWARD_AND_BACKWARD * MULTIPLY_ADD

# (layer index in its stack, sequence length, is causal) -> mean number of keys per query.
Keys = Callable[[int, int, bool], float]


@dataclass(frozen=True, kw_only=True)
class _Stack:
    """Layers of one config, and the tokens of a sample that they compute."""

    model: TransformerConfig
    source: int  # tokens of a single stack, or of the encoder
    target: int = 0  # of layers with cross attention
    is_causal: bool = True
    # Of layers that read other sequences in parts: all tokens of these, and those that a query
    # sees; the encoder of neighbors, and the length of a neighbor.
    others: int = 0
    seen: int = 0
    encoder: tuple[_Stack, int] | None = None


@dataclass(frozen=True, kw_only=True)
class ModelFlops:
    """FLOPs of training on one batch, by kind of operation."""

    linear: float = 0.0  # GEMMs with weights: projections, MLP, logits
    attention: float = 0.0  # query-key and score-value GEMMs; convolutions and scans

    @property
    def total(self) -> float:
        """Sum of both kinds."""
        return self.linear + self.attention


def num_floating_point_operations(
    config: RunConfig, batch_size: int, padded_vocab_size: int
) -> float:
    """Return the FLOPs of a step on ``batch_size`` samples by Megatron-LM's formula."""
    return _flops(
        config,
        batch_size,
        padded_vocab_size,
        lambda _layer_index, length, is_causal: length / 2 if is_causal else length,
        1,
    ).total


def causal_model_flops(config: RunConfig, batch_size: int, padded_vocab_size: int) -> ModelFlops:
    """Return the FLOPs of a step on ``batch_size`` samples, attention counted under its mask."""
    hidden_share = config.data.mask_prob if model_kind_of(config).has_masked_lm_head else 1
    return _flops(config, batch_size, padded_vocab_size, _keys_of(config.model), hidden_share)


def layer_flops(config: RunConfig) -> list[float]:
    """Return the FLOPs of each layer per token of the sample, attention counted under its mask.

    The layers of multi-token prediction come after the decoder's, counted without their
    projections.
    """
    keys = _keys_of(config.model)
    length = config.data.seq_length
    stack = _stack_of(config)
    parts = [_multiply_adds(stack, layer, i, keys) for i, layer in enumerate(layers_of(config))]
    scale = MULTIPLY_ADD * gemms_per_weight(config)
    return [(scale * linear + _SCALE * mixing) / length for linear, mixing in parts]


def gemms_per_weight(config: RunConfig) -> int:
    """Return the GEMMs of a step with each weight of the language model: 2 if it is frozen."""
    return FORWARD_AND_BACKWARD - (config.vision.freeze_LM or config.adapters.lora is not None)


def image_flops(config: RunConfig) -> ModelFlops:
    """Return the FLOPs of a sample's encoder and projector, or of a classifier's patches."""
    kind = model_kind_of(config)
    if kind.classifies_images:  # the first layer needs no gradient of pixels
        patches = num_patches(config.vision) * pixels_of_patch(config.vision)
        embedding = (FORWARD_AND_BACKWARD - 1) * patches * config.model.hidden_size
        return ModelFlops(linear=float(MULTIPLY_ADD * embedding))
    encoders = encoders_of(config) if kind.reads_images else ()
    found = [_encoder_flops(config, encoder) for encoder in encoders]
    return ModelFlops(
        linear=sum(each.linear for each in found), attention=sum(each.attention for each in found)
    )


def _encoder_flops(config: RunConfig, images: MediaEncoder) -> ModelFlops:
    is_trained = not config.vision.freeze_ViT
    model = images.layers
    num_tokens = images.num_tokens
    linear, mixing = _multiply_adds(
        _Stack(model=model, source=num_tokens, is_causal=False),
        Layer(attention=FULL, mlp=FULL, ffn_hidden_size=model.ffn_hidden_size or 0),
        0,
        lambda _layer_index, length, _is_causal: length,
    )
    passes = FORWARD_AND_BACKWARD if is_trained else 1
    without, within = images.input_products
    before = (1 + is_trained) * without + passes * within
    first, *second = (sum(r.values()) * c for _, r, c in projector_layers(config, images))
    projected = (2 + is_trained) * first + FORWARD_AND_BACKWARD * sum(second)
    scale = MULTIPLY_ADD * images.max_tiles
    weights = passes * model.num_layers * linear + before + images.num_embeddings * projected
    return ModelFlops(
        linear=float(scale * weights), attention=float(scale * passes * model.num_layers * mixing)
    )


def _stack_of(config: RunConfig) -> _Stack:
    model = config.model
    length = config.data.seq_length
    kind = model_kind_of(config)
    stack = _Stack(
        model=model,
        source=length,
        target=config.data.decoder_seq_length or 0,
        is_causal=kind.is_causal,
    )
    if not kind.reads_neighbors:
        return stack
    m = config.retro.retro_chunk_length
    num_seen = config.retro.retro_num_neighbors * config.retro.retrieved_length
    num_tokens = length // m * num_seen
    inner = _Stack(model=model, source=num_tokens, is_causal=False, others=length, seen=m)
    encoder = inner, config.retro.retrieved_length
    return replace(stack, others=num_tokens, seen=num_seen, encoder=encoder)


def _keys_of(model: TransformerConfig) -> Keys:
    def keys(layer_index: int, length: int, is_causal: bool) -> float:
        # A query's own position and those before or behind it; None: without a limit.
        window = window_of_layer(model, layer_index) or (-1, -1)
        before, behind = (None if count < 0 else count + 1 for count in window)
        found = mean_keys_per_query(length, before)
        return found if is_causal else found + mean_keys_per_query(length, behind) - 1

    return keys


def mean_keys_per_query(seq_length: int, window: int | None = None) -> float:
    """Return the mean number of keys of a causal query.

    A query attends to its own and to earlier positions, at most ``window`` of them.
    """
    window = seq_length if window is None else min(window, seq_length)
    growing = window * (window + 1) / 2  # queries that do not fill the window yet
    return (growing + (seq_length - window) * window) / seq_length


def _flops(
    config: RunConfig, batch_size: int, padded_vocab_size: int, keys: Keys, hidden_share: float
) -> ModelFlops:
    """Return the FLOPs of a step.

    ``hidden_share``: fraction of BERT's tokens that are multiplied by the vocabulary matrix.
    """
    stack = _stack_of(config)
    images = image_flops(config)
    parts = [_multiply_adds(stack, layer, i, keys) for i, layer in enumerate(layers_of(config))]
    linear = sum(linear for linear, _ in parts) + _heads(config, padded_vocab_size, hidden_share)
    mixing = sum(mixing for _, mixing in parts)
    scale = MULTIPLY_ADD * gemms_per_weight(config)
    return ModelFlops(
        linear=float(batch_size * (scale * linear + images.linear)),
        attention=float(batch_size * (_SCALE * mixing + images.attention)),
    )


def _heads(config: RunConfig, padded_vocab_size: int, hidden_share: float) -> float:
    """Return the multiply-adds of one sample outside the layers, forward.

    These are the output heads and the projections of multi-token prediction.
    """
    model, hidden, length = config.model, config.model.hidden_size, config.data.seq_length
    kind = model_kind_of(config)
    if kind.classifies_images:
        return hidden * config.image_classifier.num_classes
    if kind.has_masked_lm_head:
        order = hidden * (hidden + 2) if config.language_model.bert_binary_head else 0
        return hidden_share * length * hidden * (hidden + padded_vocab_size) + order
    if kind.has_encoder:
        return (config.data.decoder_seq_length or 0) * hidden * padded_vocab_size
    ahead = model.mtp_num_layers or 0
    columns = padded_vocab_size + ahead * (padded_vocab_size + 2 * hidden)
    joined = streams_matrix(model, 1)[0] * model.enable_mhc_connections
    return length * (hidden * columns + joined)


def _multiply_adds(
    stack: _Stack, layer: Layer, layer_index: int, keys: Keys
) -> tuple[float, float]:
    """Return the forward multiply-adds of one sample: with weights, and between tokens.

    Per token of a full layer, with h = hidden, a = heads, g = query groups, d = kv channels: q and
    output projection 2*h*a*d, k and v 2*h*g*d, MLP 2 or (gated) 3 times h*ffn, scores and their
    product with the values 2*a*d*keys.  A part that is replaced by one matrix has h*h, an absent
    one nothing.  Keys and values of cross attention are computed from the encoder's tokens.
    """
    model = stack.model
    source = stack.source
    reads_encoder = layer.has_cross_attention and not stack.others
    tokens = stack.target if reads_encoder else source
    hidden, groups_width = model.hidden_size, model.num_query_groups * model.kv_channels
    heads_width = model.num_attention_heads * model.kv_channels
    if model.multi_latent_attention:  # the mean of the widths of keys and of values
        heads_width = model.num_attention_heads * (model.kv_channels + model.v_head_dim) // 2
    width = (layer.attention, layer.mlp).count(LINEAR) * hidden
    if layer.has_experts:  # the router, and the gate of shared experts
        width += (model.num_moe_experts or 0) + bool(model.moe_shared_expert_gate)
    products = float(hidden * width)
    for name, rows, columns in linear_layers(model, layer):
        selected: float = model.moe_router_topk if name.startswith(EXPERTS) else 1
        if ".indexer." in name:  # its inputs have no gradient, its weights only with a loss
            selected = (1 + bool(model.dsa_indexer_loss_coeff)) / FORWARD_AND_BACKWARD
        products += selected * sum(rows.values()) * columns
    mixed = 0
    if model.enable_mhc_connections:  # of attention and MLP; their streams are read and mixed
        products += 2 * streams_matrix(model)[0]
        mixed = 2 * (1 + model.mhc_num_residual_streams) * model.residual_width
    linear, mixing = float(tokens * products), float(tokens * mixed)
    if layer.attention == FULL:
        is_causal = stack.is_causal and not layer.is_encoder
        at = min(layer_index, model.num_layers - 1)  # MTP layers are like the last one
        if reads_encoder:
            at = layer_index - model.num_layers
        seen = keys(at, tokens, is_causal)
        if layer.has_indexer:  # frozen without a loss
            scores = model.dsa_indexer_n_heads * (model.dsa_indexer_head_dim + 1) * tokens * seen
            mixing += scores if model.dsa_indexer_loss_coeff else scores / FORWARD_AND_BACKWARD
        if model.experimental_attention_variant == SPARSE_VARIANT:
            seen = min(seen, mean_keys_per_query(tokens, model.dsa_indexer_topk))
        mixing += tokens * 2 * heads_width * seen
    if layer.has_cross_attention:
        linear += 2 * hidden * (tokens * heads_width + (stack.others or source) * groups_width)
        mixing += tokens * 2 * heads_width * (stack.seen or source)
    for inner in layer.encoder:
        assert stack.encoder is not None, "a layer with an encoder reads neighbors"
        of_neighbors, length = stack.encoder
        added = _multiply_adds(of_neighbors, inner, 0, lambda *_, r=length: r)
        linear += added[0]
        mixing += added[1]
    if layer.has_mixer:
        shape = mixer_shape(model)
        matrices = hidden * (sum(shape.projected) + shape.inner)
        mixing += tokens * (shape.flops_per_token / MULTIPLY_ADD - matrices)
    if layer.attention == DELTA_NET:
        mixing += tokens * delta_net_shape(model).mixing_per_token
    return linear, mixing


def tokens_of_a_sample(config: RunConfig) -> int:
    """Return the number of tokens of a sample; of an encoder-decoder, in both sequences."""
    has_decoder = model_kind_of(config).has_encoder
    return config.data.seq_length + (config.data.decoder_seq_length or 0) * has_decoder


# FLOP/s, dense bf16 (fp16 where the chip has no bf16); the first name that is part of the
# device's name counts, so longer names come first.
_DENSE_BF16 = {
    "GB300": 2500e12,
    "GB200": 2500e12,
    "B300": 2250e12,
    "B200": 2250e12,
    "GH200": 989.4e12,
    "H200": 989.4e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835.5e12,
    "H800": 989.4e12,
    "H100": 989.4e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "A40": 149.7e12,
    "A30": 165e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "V100": 125e12,
    "MI300X": 1307e12,
    "MI250X": 383e12,
}


def known_peak(name: str) -> float | None:
    """Return the dense bf16 FLOP/s of the GPU called ``name``, None if it is not known."""
    return next((peak for part, peak in _DENSE_BF16.items() if part in name), None)

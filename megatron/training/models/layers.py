"""Parts of each layer of a model, derived from the flags; one function per model structure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron.core.ssm.mamba_hybrid_layer_allocation import (
    ATTENTION,
    EXPERTS,
    MAMBA,
    MLP,
    layer_pattern,
)
from megatron.core.transformer.heterogeneous.heterogeneous_config import (
    FULL,
    NO_OP,
    LayerShape,
    layer_shapes,
)
from megatron.core.transformer.layer_layout import has_experts, layer_ranges, stacked_ranges
from megatron.training.config.run import RunConfig


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Parts of one layer.

    ``attention`` and ``mlp`` have the values of `LayerShape`.  A layer of a hybrid model has
    exactly one part: a Mamba mixer, attention or an MLP.
    """

    attention: str = NO_OP
    mlp: str = NO_OP
    ffn_hidden_size: int = 0
    has_experts: bool = False
    has_mixer: bool = False
    has_cross_attention: bool = False
    is_encoder: bool = False  # part of the encoder, whose output the decoder attends to


def stack_of_layers(run: RunConfig) -> list[Layer]:
    """Return the layers of a single stack, followed by those of multi-token prediction."""
    model = run.model
    width = model.ffn_hidden_size or 0
    shapes = list(layer_shapes(model) or [LayerShape(FULL, FULL, width)] * model.num_layers)
    shapes += shapes[-1:] * (model.mtp_num_layers or 0)
    return [
        Layer(
            attention=shape.attention,
            mlp=shape.mlp,
            ffn_hidden_size=shape.ffn_hidden_size or 0,
            has_experts=has_experts(model, i),
        )
        for i, shape in enumerate(shapes)
    ]


def hybrid_layers(run: RunConfig) -> list[Layer]:
    """Return the layers of a hybrid model, which the --hybrid-* flags select."""
    lm = run.language_model
    pattern = layer_pattern(
        run.model.num_layers,
        lm.hybrid_attention_ratio,
        lm.hybrid_mlp_ratio,
        lm.hybrid_override_pattern,
    )
    of_letter = {
        MAMBA: Layer(has_mixer=True),
        ATTENTION: Layer(attention=FULL),
        MLP: Layer(mlp=FULL, ffn_hidden_size=run.model.ffn_hidden_size or 0),
        EXPERTS: Layer(mlp=FULL, has_experts=True),
    }
    return [of_letter[letter] for letter in pattern]


def encoder_decoder_layers(run: RunConfig) -> list[Layer]:
    """Return the encoder layers, then the decoder layers."""
    width = run.model.ffn_hidden_size or 0
    encoder = Layer(attention=FULL, mlp=FULL, ffn_hidden_size=width, is_encoder=True)
    decoder = replace(encoder, is_encoder=False, has_cross_attention=True)
    depth = run.language_model.decoder_num_layers or 0
    return [encoder] * run.model.num_layers + [decoder] * depth


def stages_of_stack(run: RunConfig) -> tuple[range, ...]:
    """Return the layer range of each virtual stage, multi-token prediction layers excluded."""
    return layer_ranges(run.model, run.model.pipeline_model_parallel_size)


def stages_of_encoder_decoder(run: RunConfig) -> tuple[range, ...]:
    """Return the range into `encoder_decoder_layers` of each pipeline stage."""
    model, num_ranks = run.model, run.model.pipeline_model_parallel_size
    depths = model.num_layers, run.language_model.decoder_num_layers or 0
    if num_ranks == 1:
        return (range(sum(depths)),)
    first, found = model.encoder_pipeline_model_parallel_size, []
    for rank in range(num_ranks):
        encoder, decoder = stacked_ranges(depths, first, pp_rank=rank, num_ranks=num_ranks)
        if encoder is not None:
            found.append(encoder)
        if decoder is not None:
            found.append(range(depths[0] + decoder.start, depths[0] + decoder.stop))
    return tuple(found)

"""Flags for the model outside its transformer layers: embeddings, positions, output layer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from megatron.core.config.option import INT64_MAX, MAX_LAYERS, option
from megatron.core.registry import Registry

# Values are `ModelKind` objects of megatron.training.models, which this package cannot import.
MODEL_KINDS = Registry[object](
    "--model-kind",
    {
        "gpt": "megatron.training.models.kind:GPT",
        "bert": "megatron.training.models.kind:BERT",
        "mamba": "megatron.training.models.kind:MAMBA",
        "mimo": "megatron.training.models.kind:MIMO",
        "retro": "megatron.training.models.kind:RETRO",
        "t5": "megatron.training.models.kind:T5",
        "vit": "megatron.training.models.kind:VIT",
        "vlm": "megatron.training.models.kind:VLM",
    },
)
_network = partial(option, group="network size")
_experimental = partial(option, group="experimental")


@dataclass(frozen=True, kw_only=True)
class LanguageModelConfig:
    model_kind: str = _network(
        "gpt",
        "Model architecture; each entry script sets its own (default: gpt).",
        default=None,
        choices=MODEL_KINDS,
    )
    encoder_num_layers: int | None = _network(
        None,
        "Alias of --num-layers; of T5 it sets encoder and decoder, unless "
        "--decoder-num-layers is given.",
        at_most=MAX_LAYERS,
    )
    decoder_num_layers: int | None = _network(
        None,
        "Decoder layers of an encoder-decoder model; those of the encoder if not given.",
        at_least=1,
        at_most=MAX_LAYERS,
    )
    max_position_embeddings: int | None = _network(
        None, "Maximum sequence length in tokens that the model has positions for.", at_least=1
    )
    position_embedding_type: str = _network(
        "learned_absolute",
        "Position embedding: learned_absolute (a table), rope (rotary), yarn (rope with "
        "--rope-type yarn), mrope (rotary by time, height and width), relative (T5's learned "
        "attention bias), alibi (linear attention bias) or none.",
        choices=("learned_absolute", "rope", "yarn", "mrope", "relative", "none", "alibi"),
    )
    rotary_base: int = _network(
        10000, "Base of the rotary frequencies.", at_least=1, at_most=INT64_MAX
    )
    rotary_percent: float = _network(
        1.0, "Fraction of each head's channels that is rotated, 0 to 1."
    )
    rotary_seq_len_interpolation_factor: int | None = _network(
        None, "Divide rotary positions by this factor (linear context extension)."
    )
    use_rope_scaling: bool = _network(
        False, "Scale rotary frequencies as Llama 3 does for long contexts."
    )
    rope_scaling_factor: float = _network(8.0, "Context extension factor of --use-rope-scaling.")
    make_vocab_size_divisible_by: int = _network(
        128, "Pad the vocabulary to a multiple of this times the tensor-parallel size.", at_least=1
    )
    pad_vocab_in_loss: bool = _network(
        False,
        "Include the padding rows of the vocabulary in the softmax, as Megatron-LM does; "
        "needed only to continue its checkpoints with equal losses.",
    )
    bert_binary_head: bool = _network(
        True, "Train BERT without its next-sentence head.", flag="--bert-no-binary-head"
    )
    untie_embeddings_and_output_weights: bool = _network(
        False, "Give the output layer its own weight instead of sharing the word embeddings."
    )
    fp16_lm_cross_entropy: bool = option(
        False,
        "Compute the cross-entropy loss in fp16.",
        group="mixed precision",
        ignored="the loss is computed in float32 whatever the precision of the logits",
    )
    spec: tuple[str, ...] | None = _experimental(
        None, "Module and attribute name of a layer spec, or local.", nargs="*"
    )
    hybrid_attention_ratio: float = _experimental(
        0.0,
        "Fraction of attention layers in a hybrid model; ignored when "
        "--hybrid-override-pattern is set.",
    )
    hybrid_mlp_ratio: float = _experimental(
        0.0,
        "Fraction of MLP layers in a hybrid model; ignored when --hybrid-override-pattern is set.",
    )
    hybrid_override_pattern: str | None = _experimental(
        None,
        "One letter per layer of a hybrid model: M (Mamba), * (attention), - (MLP) or E (MoE).",
        aliases=("--hybrid-layer-pattern",),
    )

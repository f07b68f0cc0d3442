"""What a language model has around its transformer."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config import states
from megatron.core.config.option import option


@dataclass(frozen=True, kw_only=True)
class LanguageModelConfig:
    """What a language model has around its transformer."""

    model_kind: str | None = option(
        None,
        "Which kind of model the flags describe; entry scripts set it, tools are told (default: "
        "gpt).",
        group="network size",
        choices=("gpt", "bert", "mamba", "t5"),
    )
    encoder_num_layers: int | None = option(
        None,
        "Another name of --num-layers: of both halves of T5, unless its decoder has a depth of its "
        "own.",
        group="network size",
    )
    decoder_num_layers: int | None = option(
        None,
        "Decoder layers of an encoder-decoder model; as many as its encoder has if not given.",
        group="network size",
    )
    max_position_embeddings: int | None = option(
        None,
        "Longest sequence in tokens that the model has positions for.",
        group="network size",
    )
    position_embedding_type: str = option(
        "learned_absolute",
        "How positions enter: learned_absolute (a table), rope (rotation of queries and "
        "keys), yarn (rope with --rope-type yarn), relative (T5's learned bias on the scores), "
        "alibi (a slope on the scores) or none.",
        group="network size",
        choices=("learned_absolute", "rope", "yarn", "mrope", "relative", "none", "alibi"),
        refused_values={"mrope": states.MULTIMODAL},
    )
    rotary_base: int = option(
        10000,
        "Base of the geometric series of rotary frequencies.",
        group="network size",
    )
    rotary_percent: float = option(
        1.0,
        "Share of a head's width that is rotated, 0 to 1.",
        group="network size",
    )
    rotary_seq_len_interpolation_factor: int | None = option(
        None,
        "Divide positions by this before they are rotated, to stretch the context.",
        group="network size",
    )
    use_rope_scaling: bool = option(
        False,
        "Scale rotary frequencies as Llama 3 does for its long contexts.",
        group="network size",
    )
    rope_scaling_factor: float = option(
        8.0,
        "Factor by which --use-rope-scaling stretches the context.",
        group="network size",
    )
    make_vocab_size_divisible_by: int = option(
        128,
        "Pad the vocabulary to a multiple of this times the tensor-parallel size.",
        group="network size",
    )
    pad_vocab_in_loss: bool = option(
        False,
        "Let the padding rows of the vocabulary enter the softmax, as the reference does; "
        "needed only to continue its checkpoints with the same numbers.",
        group="network size",
    )
    bert_binary_head: bool = option(
        True,
        "Train BERT without its next-sentence head.",
        group="network size",
        flag="--bert-no-binary-head",
    )
    untie_embeddings_and_output_weights: bool = option(
        False,
        "Give the output layer a weight of its own instead of the word embeddings.",
        group="network size",
    )
    fp16_lm_cross_entropy: bool = option(
        False,
        "Compute the loss in float16.",
        group="mixed precision",
        ignored="the loss is computed in float32 whatever the precision of the logits",
    )
    spec: tuple[str, ...] | None = option(
        None,
        "Module and name of a layer specification, or local.",
        group="experimental",
        nargs="*",
    )
    hybrid_attention_ratio: float = option(
        0.0,
        "Share of attention layers in a hybrid model.",
        group="experimental",
    )
    hybrid_mlp_ratio: float = option(
        0.0,
        "Share of MLP layers in a hybrid model.",
        group="experimental",
    )
    hybrid_override_pattern: str | None = option(
        None,
        "A letter for each layer: M for Mamba, * for attention, - for an MLP, E for experts.",
        aliases=("--hybrid-layer-pattern",),
        group="experimental",
    )

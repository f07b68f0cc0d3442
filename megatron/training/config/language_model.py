"""What a language model has around its transformer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from megatron.core.config import flag_messages
from megatron.core.config.option import INT64_MAX, MAX_LAYERS, option

_network = partial(option, group="network size")
_experimental = partial(option, group="experimental")


@dataclass(frozen=True, kw_only=True)
class LanguageModelConfig:
    model_kind: str | None = _network(
        None,
        "Which kind of model the flags describe; entry scripts set it, tools are told (default: "
        "gpt).",
        choices=("gpt", "bert", "mamba", "t5"),
    )
    encoder_num_layers: int | None = _network(
        None,
        "Another name of --num-layers: of both halves of T5, unless its decoder has a depth of its "
        "own.",
        at_most=MAX_LAYERS,
    )
    decoder_num_layers: int | None = _network(
        None,
        "Decoder layers of an encoder-decoder model; as many as its encoder has if not given.",
        at_least=1,
        at_most=MAX_LAYERS,
    )
    max_position_embeddings: int | None = _network(
        None, "Longest sequence in tokens that the model has positions for.", at_least=1
    )
    position_embedding_type: str = _network(
        "learned_absolute",
        "How positions enter: learned_absolute (a table), rope (rotation of queries and "
        "keys), yarn (rope with --rope-type yarn), relative (T5's learned bias on the scores), "
        "alibi (a slope on the scores) or none.",
        choices=("learned_absolute", "rope", "yarn", "mrope", "relative", "none", "alibi"),
        refused_values={"mrope": flag_messages.MULTIMODAL},
    )
    rotary_base: int = _network(
        10000, "Base of the geometric series of rotary frequencies.", at_least=1, at_most=INT64_MAX
    )
    rotary_percent: float = _network(1.0, "Share of a head's width that is rotated, 0 to 1.")
    rotary_seq_len_interpolation_factor: int | None = _network(
        None, "Divide positions by this before they are rotated, to stretch the context."
    )
    use_rope_scaling: bool = _network(
        False, "Scale rotary frequencies as Llama 3 does for its long contexts."
    )
    rope_scaling_factor: float = _network(
        8.0, "Factor by which --use-rope-scaling stretches the context."
    )
    make_vocab_size_divisible_by: int = _network(
        128, "Pad the vocabulary to a multiple of this times the tensor-parallel size.", at_least=1
    )
    pad_vocab_in_loss: bool = _network(
        False,
        "Let the padding rows of the vocabulary enter the softmax, as the reference does; "
        "needed only to continue its checkpoints with the same numbers.",
    )
    bert_binary_head: bool = _network(
        True, "Train BERT without its next-sentence head.", flag="--bert-no-binary-head"
    )
    untie_embeddings_and_output_weights: bool = _network(
        False, "Give the output layer a weight of its own instead of the word embeddings."
    )
    fp16_lm_cross_entropy: bool = option(
        False,
        "Compute the loss in float16.",
        group="mixed precision",
        ignored="the loss is computed in float32 whatever the precision of the logits",
    )
    spec: tuple[str, ...] | None = _experimental(
        None, "Module and name of a layer specification, or local.", nargs="*"
    )
    hybrid_attention_ratio: float = _experimental(
        0.0, "Share of attention layers in a hybrid model."
    )
    hybrid_mlp_ratio: float = _experimental(0.0, "Share of MLP layers in a hybrid model.")
    hybrid_override_pattern: str | None = _experimental(
        None,
        "A letter for each layer: M for Mamba, * for attention, - for an MLP, E for experts.",
        aliases=("--hybrid-layer-pattern",),
    )

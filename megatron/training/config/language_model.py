"""What a language model has around its transformer."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config.option import option


@dataclass(frozen=True, kw_only=True)
class LanguageModelConfig:
    """What a language model has around its transformer."""

    encoder_num_layers: int | None = option(None, "", group="network size")
    decoder_num_layers: int | None = option(None, "", group="network size")
    max_position_embeddings: int | None = option(None, "", group="network size")
    position_embedding_type: str = option(
        "learned_absolute",
        "",
        group="network size",
        choices=("learned_absolute", "rope", "mrope", "relative", "none", "alibi"),
    )
    rotary_base: int = option(10000, "", group="network size")
    rotary_percent: float = option(1.0, "", group="network size")
    rotary_seq_len_interpolation_factor: int | None = option(None, "", group="network size")
    use_rope_scaling: bool = option(False, "", group="network size")
    rope_scaling_factor: float = option(8.0, "", group="network size")
    make_vocab_size_divisible_by: int = option(128, "", group="network size")
    pad_vocab_in_loss: bool = option(
        False,
        "Let the padding rows of the vocabulary enter the softmax, as the reference does; "
        "needed only to continue its checkpoints with the same numbers.",
        group="network size",
    )
    bert_binary_head: bool = option(True, "", group="network size", flag="--bert-no-binary-head")
    untie_embeddings_and_output_weights: bool = option(False, "", group="network size")
    fp16_lm_cross_entropy: bool = option(False, "", group="mixed precision")
    spec: tuple[str, ...] | None = option(None, "", group="experimental", nargs="*")
    hybrid_attention_ratio: float = option(0.0, "", group="experimental")
    hybrid_mlp_ratio: float = option(0.0, "", group="experimental")
    hybrid_override_pattern: str | None = option(None, "", group="experimental")

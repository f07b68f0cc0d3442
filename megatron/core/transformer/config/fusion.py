"""Which fused kernels may be used."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config.option import option


@dataclass(frozen=True, kw_only=True)
class FusionConfig:
    """Which fused kernels may be used."""

    masked_softmax_fusion: bool = option(True, "", group="training")
    bias_gelu_fusion: bool = option(True, "", group="training")
    bias_swiglu_fusion: bool = option(True, "", group="training")
    use_fused_weighted_squared_relu: bool = option(False, "", group="training")
    bias_dropout_fusion: bool = option(True, "", group="training")
    apply_rope_fusion: bool = option(True, "", group="training", flag="--no-rope-fusion")
    cross_entropy_loss_fusion: bool = option(False, "", group="training")
    cross_entropy_fusion_impl: str = option(
        "native",
        "",
        group="training",
        choices=("native", "te"),
    )
    persist_layer_norm: bool = option(
        True,
        "",
        group="training",
        inverted=True,
        dest="no_persist_layer_norm",
    )

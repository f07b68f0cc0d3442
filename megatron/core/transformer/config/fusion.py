"""Which fused kernels may be used."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config import states
from megatron.core.config.option import option


@dataclass(frozen=True, kw_only=True)
class FusionConfig:
    """Which fused kernels may be used."""

    compile: str = option(
        "none",
        "What PyTorch compiles: nothing, each transformer layer, or all layers of a stage as one.",
        group="training",
        choices=("none", "layer", "model"),
    )
    masked_softmax_fusion: bool = option(
        True,
        "Do not fuse scaling, mask and softmax.",
        group="training",
    )
    bias_gelu_fusion: bool = option(
        True,
        "Compute GELU exactly instead of by the tanh form that the fused kernel has.",
        group="training",
    )
    bias_swiglu_fusion: bool = option(
        True,
        "Do not fuse bias and gated SiLU.",
        group="training",
    )
    use_fused_weighted_squared_relu: bool = option(
        False,
        "Fuse the router's weight with squared ReLU.",
        group="training",
        ignored=states.NO_KERNEL,
    )
    bias_dropout_fusion: bool = option(
        True,
        "Do not fuse bias, dropout and residual.",
        group="training",
        ignored=states.NO_KERNEL,
    )
    apply_rope_fusion: bool = option(
        True,
        "Do not fuse the rotation of queries and keys.",
        group="training",
        flag="--no-rope-fusion",
    )
    cross_entropy_loss_fusion: bool = option(
        False,
        "Compute the loss without keeping the softmax.",
        group="training",
        ignored=states.NO_KERNEL,
    )
    cross_entropy_fusion_impl: str = option(
        "native",
        "Which fused loss --cross-entropy-loss-fusion takes.",
        group="training",
        choices=("native", "te"),
        ignored=states.NO_KERNEL,
    )
    persist_layer_norm: bool = option(
        True,
        "Do not use the persistent layer norm kernel.",
        group="training",
        inverted=True,
        dest="no_persist_layer_norm",
        ignored=states.NO_KERNEL,
    )

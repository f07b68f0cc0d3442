"""Options that select fused kernels and torch.compile."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from megatron.core.config import flag_messages
from megatron.core.config.option import option

_training = partial(option, group="training")


@dataclass(frozen=True, kw_only=True)
class FusionConfig:
    """Options that select fused kernels and torch.compile."""

    compile: str = _training(
        "none",
        "Regions for torch.compile: none, each transformer layer (layer) or all layers of a "
        "stage (model).",
        choices=("none", "layer", "model"),
    )
    batch_invariant_mode: bool = _training(
        False,
        "Compute the forward pass by kernels that sum in a fixed order, so that a token has the "
        "same bits in any batch; log-probabilities then equal those of the generation engine with "
        "--inference-batch-invariant. On a CPU only; slower.",
    )
    masked_softmax_fusion: bool = _training(True, "Do not fuse scaling, masking and softmax.")
    bias_gelu_fusion: bool = _training(
        True,
        "Do not fuse bias and GELU; the fused kernel uses the tanh approximation, the "
        "unfused one exact GELU.",
    )
    bias_swiglu_fusion: bool = _training(True, "Do not fuse bias and SwiGLU.")
    use_fused_weighted_squared_relu: bool = _training(
        False, "Fuse the router's weight with squared ReLU.", ignored=flag_messages.NO_KERNEL
    )
    bias_dropout_fusion: bool = _training(
        True, "Do not fuse bias, dropout and residual; they are fused on GPUs only."
    )
    apply_rope_fusion: bool = _training(
        True, "Do not fuse the rotary embedding of queries and keys.", flag="--no-rope-fusion"
    )
    cross_entropy_loss_fusion: bool = _training(
        False, "Use a fused cross-entropy loss.", ignored=flag_messages.NO_KERNEL
    )
    cross_entropy_fusion_impl: str = _training(
        "native",
        "Implementation of --cross-entropy-loss-fusion.",
        choices=("native", "te"),
        ignored=flag_messages.NO_KERNEL,
    )
    persist_layer_norm: bool = _training(
        True,
        "Do not use the persistent layer norm kernel.",
        inverted=True,
        dest="no_persist_layer_norm",
        ignored=flag_messages.NO_KERNEL,
    )

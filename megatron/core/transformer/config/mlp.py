"""Width, activation and bias of the MLP."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config.option import option


@dataclass(frozen=True, kw_only=True)
class MLPConfig:
    """Width, activation and bias of the MLP."""

    ffn_hidden_size: int = option(
        None,
        "Inner width of the MLP; 4 times the hidden size, or 8/3 of it in multiples of 64 "
        "with --swiglu, if not given.",
        group="network size",
    )
    activation_func_clamp_value: float | None = option(
        None,
        "Largest value of a gated MLP's gate, and largest magnitude of what it gates.",
        group="network size",
    )
    glu_linear_offset: float = option(
        0.0,
        "Added to what the gate of a gated MLP multiplies.",
        group="network size",
    )
    add_bias_linear: bool = option(
        True,
        "Drop the biases of the linear layers.",
        group="training",
        flag="--disable-bias-linear",
    )

"""Width, activation and bias of the MLP."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from megatron.core.config.option import option

_network = partial(option, group="network size")


@dataclass(frozen=True, kw_only=True)
class MLPConfig:
    """Width, activation and bias of the MLP."""

    ffn_hidden_size: int = _network(
        None,
        "Inner width of the MLP; 4 times the hidden size, or 8/3 of it in multiples of 64 "
        "with --swiglu, if not given.",
        at_least=1,
    )
    activation_func_clamp_value: float | None = _network(
        None, "Largest value of a gated MLP's gate, and largest magnitude of what it gates."
    )
    glu_linear_offset: float = _network(
        0.0, "Added to what the gate of a gated MLP multiplies.", at_least=None
    )
    add_bias_linear: bool = option(
        True,
        "Drop the biases of the linear layers.",
        group="training",
        flag="--disable-bias-linear",
    )

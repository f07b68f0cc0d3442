"""MLP options: width, activation and bias."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from megatron.core.config.option import option

_network = partial(option, group="network size")


@dataclass(frozen=True, kw_only=True)
class MLPConfig:
    """MLP options: width, activation and bias."""

    ffn_hidden_size: int = _network(
        None,
        "Hidden size of the MLP; 4 x hidden size if not given, with --swiglu 8/3 of it in "
        "multiples of 64.",
        at_least=1,
    )
    activation_func_clamp_value: float | None = _network(
        None, "Upper bound of a gated MLP's gate, and bound of the magnitude of its linear input."
    )
    glu_linear_offset: float = _network(
        0.0, "Offset added to the linear input of a gated MLP.", at_least=None
    )
    add_bias_linear: bool = option(
        True,
        "Disable the biases of linear layers.",
        group="training",
        flag="--disable-bias-linear",
    )

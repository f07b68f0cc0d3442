"""Width, activation and bias of the MLP."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config.option import option


@dataclass(frozen=True, kw_only=True)
class MLPConfig:
    """Width, activation and bias of the MLP."""

    ffn_hidden_size: int = option(None, "", group="network size")
    add_bias_linear: bool = option(True, "", group="training", flag="--disable-bias-linear")

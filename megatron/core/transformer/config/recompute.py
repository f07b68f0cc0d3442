"""What backward computes again instead of keeping."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config.option import option


@dataclass(frozen=True, kw_only=True)
class RecomputeConfig:
    """What backward computes again instead of keeping."""

    recompute_granularity: str | None = option(
        None,
        "",
        group="training",
        choices=("full", "selective"),
    )
    distribute_saved_activations: bool = option(False, "", group="training")
    recompute_method: str | None = option(None, "", group="training", choices=("uniform", "block"))
    recompute_num_layers: int | None = option(None, "", group="training")
    recompute_modules: tuple[str, ...] | None = option(None, "", group="training", nargs="*")

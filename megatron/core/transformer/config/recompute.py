"""What backward computes again, or fetches from the host, instead of keeping it."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config.option import option


@dataclass(frozen=True, kw_only=True)
class RecomputeConfig:
    """What backward computes again, or fetches from the host, instead of keeping it."""

    recompute_granularity: str | None = option(
        None,
        "What backward computes again instead of keeping: whole layers (full), costly parts "
        "(selective), or as little as fits into --memory-budget-fraction (adaptive).",
        group="training",
        choices=("full", "selective", "adaptive"),
    )
    distribute_saved_activations: bool = option(
        False,
        "Keep each saved layer input cut over the tensor-parallel ranks.",
        group="training",
    )
    recompute_method: str | None = option(
        None,
        "Which layers full recomputation covers: uniform chunks or the first ones of each "
        "stage (block).",
        group="training",
        choices=("uniform", "block"),
    )
    recompute_num_layers: int | None = option(
        None,
        "Layers in a chunk (uniform) or layers recomputed per stage (block).",
        group="training",
    )
    recompute_modules: tuple[str, ...] | None = option(
        None,
        "Parts of a layer that selective recomputation covers, such as core_attn, mlp and "
        "layernorm.",
        group="training",
        nargs="*",
    )

    memory_budget_fraction: float = option(
        0.9,
        "Share of the device's memory that adaptive recomputation may fill, 0 to 1.",
        group="training",
    )

    cpu_offloading: bool = option(
        False,
        "Let what the first --cpu-offloading-num-layers layers keep for backward wait in host "
        "memory.",
        group="training",
    )
    cpu_offloading_num_layers: int = option(
        0,
        "Layers of each stage whose activations leave the device; with --cpu-offloading.",
        group="training",
    )
    cpu_offloading_activations: bool = True
    cpu_offloading_weights: bool = False

    loss_chunk_size: int | None = option(
        None,
        "Tokens whose logits are there at a time; backward computes them again. 0: all. Left out: "
        "all, unless logits would take more than a tenth of the device's memory.",
        group="training",
    )

    @property
    def modules_to_recompute(self) -> tuple[str, ...]:
        """Parts of a layer that selective recomputation covers; none under another kind."""
        if self.recompute_granularity != "selective":
            return ()
        return ("core_attn",) if self.recompute_modules is None else self.recompute_modules

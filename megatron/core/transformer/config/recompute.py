"""What backward computes again, or fetches from the host, instead of keeping it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from megatron.core.config.option import option

_training = partial(option, group="training")


@dataclass(frozen=True, kw_only=True)
class RecomputeConfig:
    """What backward computes again, or fetches from the host, instead of keeping it."""

    recompute_granularity: str | None = _training(
        None,
        "What backward computes again instead of keeping: whole layers (full), costly parts "
        "(selective), or as little as fits into --memory-budget-fraction (adaptive).",
        choices=("full", "selective", "adaptive"),
    )
    distribute_saved_activations: bool = _training(
        False, "Keep each saved layer input cut over the tensor-parallel ranks."
    )
    recompute_method: str | None = _training(
        None,
        "Which layers full recomputation covers: uniform chunks or the first ones of each "
        "stage (block).",
        choices=("uniform", "block"),
    )
    recompute_num_layers: int | None = _training(
        None, "Layers in a chunk (uniform) or layers recomputed per stage (block).", at_least=1
    )
    recompute_modules: tuple[str, ...] | None = _training(
        None,
        "Parts of a layer that selective recomputation covers, such as core_attn, mlp and "
        "layernorm.",
        nargs="*",
    )

    memory_budget_fraction: float = _training(
        0.9, "Share of the device's memory that adaptive recomputation may fill, 0 to 1."
    )

    cpu_offloading: bool = _training(
        False,
        "Let what the first --cpu-offloading-num-layers layers keep for backward wait in host "
        "memory.",
    )
    cpu_offloading_num_layers: int = _training(
        0, "Layers of each stage whose activations leave the device; with --cpu-offloading."
    )
    cpu_offloading_activations: bool = True
    cpu_offloading_weights: bool = False

    loss_chunk_size: int | None = _training(
        None,
        "Tokens whose logits are there at a time; backward computes them again. 0: all. Left out: "
        "all, unless logits would take more than a tenth of the device's memory.",
    )

    @property
    def modules_to_recompute(self) -> tuple[str, ...]:
        """Parts of a layer that selective recomputation covers; none under another kind."""
        if self.recompute_granularity != "selective":
            return ()
        return ("core_attn",) if self.recompute_modules is None else self.recompute_modules

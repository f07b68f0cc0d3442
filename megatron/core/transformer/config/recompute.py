"""Options of activation recomputation, activation offloading and loss chunks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from megatron.core.config.option import option

_training = partial(option, group="training")


@dataclass(frozen=True, kw_only=True)
class RecomputeConfig:
    """Options of activation recomputation, activation offloading and loss chunks."""

    recompute_granularity: str | None = _training(
        None,
        "Activation recomputation: complete layers (full), --recompute-modules (selective), "
        "or as little as fits --memory-budget-fraction (adaptive).",
        choices=("full", "selective", "adaptive"),
    )
    distribute_saved_activations: bool = _training(
        False,
        "Shard saved layer inputs over tensor-parallel ranks; needs --recompute-granularity "
        "full, excludes --sequence-parallel.",
    )
    recompute_method: str | None = _training(
        None,
        "Layers of full recomputation: uniform (chunks of all layers) or block (the first "
        "layers of each stage).",
        choices=("uniform", "block"),
    )
    recompute_num_layers: int | None = _training(
        None, "Layers per chunk (uniform) or recomputed layers per stage (block).", at_least=1
    )
    recompute_modules: tuple[str, ...] | None = _training(
        None,
        "Modules of a layer to recompute with --recompute-granularity selective, such as "
        "core_attn, mlp and layernorm.",
        nargs="*",
    )

    memory_budget_fraction: float = _training(
        0.9, "Fraction of device memory, 0 to 1, that --recompute-granularity adaptive may use."
    )

    cpu_offloading: bool = _training(
        False,
        "Offload the activations of the first --cpu-offloading-num-layers layers to host "
        "memory until backward.",
    )
    cpu_offloading_num_layers: int = _training(
        0, "Number of layers per stage that --cpu-offloading offloads."
    )
    cpu_offloading_activations: bool = True
    cpu_offloading_weights: bool = False

    loss_chunk_size: int | None = _training(
        None,
        "Tokens per chunk of logits in the loss; backward recomputes them. 0: one chunk. If "
        "not given, chunks are used when the logits exceed a tenth of device memory.",
    )

    @property
    def modules_to_recompute(self) -> tuple[str, ...]:
        """Modules that selective recomputation covers; empty with any other granularity."""
        if self.recompute_granularity != "selective":
            return ()
        return ("core_attn",) if self.recompute_modules is None else self.recompute_modules

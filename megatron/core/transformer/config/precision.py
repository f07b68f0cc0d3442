"""Number formats inside the model."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config import states
from megatron.core.config.option import option


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Number formats inside the model."""

    disable_bf16_reduced_precision_matmul: bool = option(
        False,
        "Keep partial sums of bfloat16 matrix products in fp32 on the GPU.",
        group="mixed precision",
    )
    fp8: str | None = option(
        None,
        "fp8 format: e4m3 everywhere, or hybrid with e5m2 gradients.",
        group="Transformer-Engine",
        choices=("e4m3", "hybrid"),
        flag="--fp8-format",
        refused=states.FP8,
    )
    fp8_recipe: str = option(
        "delayed",
        "How fp8 scaling factors are found.",
        group="Transformer-Engine",
        choices=("tensorwise", "delayed", "mxfp8", "blockwise"),
        ignored=states.only_with("--fp8-format"),
    )
    fp8_margin: int = option(
        0,
        "Powers of 2 that fp8 scaling keeps free.",
        group="Transformer-Engine",
        ignored=states.only_with("--fp8-format"),
    )
    fp8_interval: int = option(
        1,
        "Steps between new fp8 scaling factors.",
        group="Transformer-Engine",
        ignored=states.only_with("--fp8-format"),
    )
    fp8_amax_history_len: int = option(
        1,
        "Steps of largest values that delayed scaling looks back on.",
        group="Transformer-Engine",
        ignored=states.only_with("--fp8-format"),
    )
    fp8_amax_compute_algo: str = option(
        "most_recent",
        "How delayed scaling reduces its history.",
        group="Transformer-Engine",
        choices=("most_recent", "max"),
        ignored=states.only_with("--fp8-format"),
    )
    fp8_wgrad: bool = option(
        True,
        "Compute weight gradients in the higher precision.",
        group="Transformer-Engine",
        ignored=states.only_with("--fp8-format"),
    )
    fp8_param: bool = option(
        False,
        "Keep and gather parameters in fp8.",
        group="Transformer-Engine",
        flag="--fp8-param-gather",
        dest="fp8_param_gather",
        ignored=states.only_with("--fp8-format"),
    )
    first_last_layers_bf16: bool = option(
        False,
        "Keep the first and last layers in bfloat16.",
        group="Transformer-Engine",
        ignored=states.only_with("--fp8-format"),
    )
    num_layers_at_start_in_bf16: int = option(
        1,
        "First layers that stay in bfloat16.",
        group="Transformer-Engine",
        ignored=states.only_with("--fp8-format"),
    )
    num_layers_at_end_in_bf16: int = option(
        1,
        "Last layers that stay in bfloat16.",
        group="Transformer-Engine",
        ignored=states.only_with("--fp8-format"),
    )
    kitchen_config_file: str | None = option(
        None,
        "Quantisation settings of the kitchen package.",
        group="kitchen",
        refused=states.KITCHEN,
    )
    kitchen_recipe_number: int | None = option(
        None,
        "Numbered recipe of the kitchen package.",
        group="kitchen",
        refused=states.KITCHEN,
    )

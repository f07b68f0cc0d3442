"""Number formats inside the model."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config.option import option


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Number formats inside the model."""

    disable_bf16_reduced_precision_matmul: bool = option(False, "", group="mixed precision")
    fp8: str | None = option(
        None,
        "",
        group="Transformer-Engine",
        choices=("e4m3", "hybrid"),
        flag="--fp8-format",
    )
    fp8_recipe: str = option(
        "delayed",
        "",
        group="Transformer-Engine",
        choices=("tensorwise", "delayed", "mxfp8", "blockwise"),
    )
    fp8_margin: int = option(0, "", group="Transformer-Engine")
    fp8_interval: int = option(1, "", group="Transformer-Engine")
    fp8_amax_history_len: int = option(1, "", group="Transformer-Engine")
    fp8_amax_compute_algo: str = option(
        "most_recent",
        "",
        group="Transformer-Engine",
        choices=("most_recent", "max"),
    )
    fp8_wgrad: bool = option(True, "", group="Transformer-Engine")
    fp8_param: bool = option(
        False,
        "",
        group="Transformer-Engine",
        flag="--fp8-param-gather",
        dest="fp8_param_gather",
    )
    first_last_layers_bf16: bool = option(False, "", group="Transformer-Engine")
    num_layers_at_start_in_bf16: int = option(1, "", group="Transformer-Engine")
    num_layers_at_end_in_bf16: int = option(1, "", group="Transformer-Engine")
    kitchen_config_file: str | None = option(None, "", group="kitchen")
    kitchen_recipe_number: int | None = option(None, "", group="kitchen")

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
    )
    fp8_recipe: str = option(
        "delayed",
        "How fp8 scaling factors are found.",
        group="Transformer-Engine",
        choices=("tensorwise", "delayed", "mxfp8", "blockwise"),
    )
    fp8_margin: int = option(
        0,
        "Powers of 2 that fp8 scaling keeps free.",
        group="Transformer-Engine",
    )
    fp8_interval: int = option(
        1,
        "Steps between new fp8 scaling factors.",
        group="Transformer-Engine",
        ignored=states.EVERY_STEP,
    )
    fp8_amax_history_len: int = option(
        1,
        "Steps of largest values that delayed scaling looks back on.",
        group="Transformer-Engine",
    )
    fp8_amax_compute_algo: str = option(
        "most_recent",
        "How delayed scaling reduces its history.",
        group="Transformer-Engine",
        choices=("most_recent", "max"),
    )
    fp8_wgrad: bool = option(
        True,
        "Compute weight gradients in the higher precision, from inputs that are kept in it.",
        group="Transformer-Engine",
    )
    fp8_param: bool = option(
        False,
        "Gather updated weights of fp8 layers as fp8.",
        group="Transformer-Engine",
        flag="--fp8-param-gather",
        dest="fp8_param_gather",
    )
    first_last_layers_bf16: bool = option(
        False,
        "Keep the first and last layers in bfloat16.",
        group="Transformer-Engine",
    )
    num_layers_at_start_in_bf16: int = option(
        1,
        "First layers that stay in bfloat16.",
        group="Transformer-Engine",
    )
    num_layers_at_end_in_bf16: int = option(
        1,
        "Last layers that stay in bfloat16.",
        group="Transformer-Engine",
    )
    fp4: str | None = option(
        None,
        "fp4 format of the products of layers.",
        group="Transformer-Engine",
        choices=("e2m1",),
        flag="--fp4-format",
    )
    fp4_recipe: str = option(
        "nvfp4",
        "How fp4 scaling factors are found.",
        group="Transformer-Engine",
        choices=("nvfp4",),
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

    @property
    def is_quantized(self) -> bool:
        """Whether the linear layers of transformer layers compute in 8 or 4 bits."""
        return self.fp8 is not None or self.fp4 is not None

    @property
    def format_flag(self) -> str:
        """What asks for that, to be named in an error."""
        if self.fp4 is not None:
            return f"fp4-format {self.fp4}"
        return f"fp8-format {self.fp8} --fp8-recipe {self.fp8_recipe}"

    @property
    def width_multiple(self) -> int:
        """What both widths of a rank's weight are multiples of, for the kernels of GPUs."""
        return 32 if self.fp4 is None and self.fp8_recipe == "mxfp8" else 16

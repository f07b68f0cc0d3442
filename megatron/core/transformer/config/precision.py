"""Number formats inside the model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from megatron.core.config import flag_messages
from megatron.core.config.option import option

_te = partial(option, group="Transformer-Engine")
_ONE_SCALE = ("delayed", "tensorwise")  # recipes with one scale for a weight


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Number formats inside the model."""

    disable_bf16_reduced_precision_matmul: bool = option(
        False,
        "Keep partial sums of bfloat16 matrix products in fp32 on the GPU.",
        group="mixed precision",
    )
    fp8: str | None = _te(
        None,
        "fp8 format: e4m3 everywhere, or hybrid with e5m2 gradients.",
        choices=("e4m3", "hybrid"),
        flag="--fp8-format",
    )
    fp8_recipe: str = _te(
        "delayed",
        "How fp8 scaling factors are found.",
        choices=("tensorwise", "delayed", "mxfp8", "blockwise"),
    )
    fp8_margin: int = _te(0, "Powers of 2 that fp8 scaling keeps free.", at_least=None)
    fp8_interval: int = _te(
        1, "Steps between new fp8 scaling factors.", ignored=flag_messages.EVERY_STEP
    )
    fp8_amax_history_len: int = _te(
        1, "Steps of largest values that delayed scaling looks back on.", at_least=1
    )
    fp8_amax_compute_algo: str = _te(
        "most_recent", "How delayed scaling reduces its history.", choices=("most_recent", "max")
    )
    fp8_wgrad: bool = _te(
        True, "Compute weight gradients in the higher precision, from inputs that are kept in it."
    )
    fp8_param: bool = _te(
        False,
        "Store weights of fp8 layers in 8 bits, and gather updated ones so, where ranks share the "
        "optimizer.",
        flag="--fp8-param-gather",
        dest="fp8_param_gather",
    )
    first_last_layers_bf16: bool = _te(False, "Keep the first and last layers in bfloat16.")
    num_layers_at_start_in_bf16: int = _te(1, "First layers that stay in bfloat16.")
    num_layers_at_end_in_bf16: int = _te(1, "Last layers that stay in bfloat16.")
    fp4: str | None = _te(
        None, "fp4 format of the products of layers.", choices=("e2m1",), flag="--fp4-format"
    )
    fp4_recipe: str = _te("nvfp4", "How fp4 scaling factors are found.", choices=("nvfp4",))
    kitchen_config_file: str | None = option(
        None,
        "Quantisation settings of the kitchen package.",
        group="kitchen",
        refused=flag_messages.KITCHEN,
    )
    kitchen_recipe_number: int | None = option(
        None,
        "Numbered recipe of the kitchen package.",
        group="kitchen",
        refused=flag_messages.KITCHEN,
    )

    @property
    def is_quantized(self) -> bool:
        """Whether the linear layers of transformer layers compute in 8 or 4 bits."""
        return self.fp8 is not None or self.fp4 is not None

    @property
    def stores_codes(self) -> bool:
        """Whether --fp8-param-gather has an effect: shares of ranks cut the blocks of a weight."""
        return self.fp8_param and self.fp8 is not None and self.fp8_recipe in _ONE_SCALE

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

"""Options of fp8 and fp4 GEMMs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from megatron.core.config import flag_messages
from megatron.core.config.option import option

_te = partial(option, group="Transformer-Engine")
_ONE_SCALE = ("delayed", "tensorwise")  # recipes with one scale per weight


@dataclass(kw_only=True)
class PrecisionConfig:
    """Options of fp8 and fp4 GEMMs."""

    disable_bf16_reduced_precision_matmul: bool = option(
        False,
        "Accumulate bf16 GEMMs in fp32 only, on a GPU.",
        group="mixed precision",
    )
    fp8: str | None = _te(
        None,
        "fp8 format of GEMMs: e4m3, or hybrid (e4m3 forward, e5m2 gradients); excludes "
        "--fp4-format.",
        choices=("e4m3", "hybrid"),
        flag="--fp8-format",
    )
    fp8_recipe: str = _te(
        "delayed",
        "Scaling recipe of fp8 tensors.",
        choices=("tensorwise", "delayed", "mxfp8", "blockwise"),
    )
    fp8_margin: int = _te(0, "Margin of fp8 scaling factors, in powers of 2.", at_least=None)
    fp8_interval: int = _te(
        1, "Steps between updates of fp8 scaling factors.", ignored=flag_messages.EVERY_STEP
    )
    fp8_amax_history_len: int = _te(
        1, "Length of the amax history in steps, with --fp8-recipe delayed.", at_least=1
    )
    fp8_amax_compute_algo: str = _te(
        "most_recent",
        "How the amax history is reduced to one amax, with --fp8-recipe delayed.",
        choices=("most_recent", "max"),
    )
    fp8_wgrad: bool = _te(
        True, "Compute weight gradients in bf16, fp16 or fp32 instead of fp8 or fp4."
    )
    fp8_param: bool = _te(
        False,
        "Store fp8 weights in 8 bits and all-gather them in fp8 with --use-distributed-optimizer.",
        flag="--fp8-param-gather",
        dest="fp8_param_gather",
    )
    first_last_layers_bf16: bool = _te(
        False, "Keep the first and last layers in bf16 under --fp8-format or --fp4-format."
    )
    num_layers_at_start_in_bf16: int = _te(
        1, "Number of first layers that --first-last-layers-bf16 keeps in bf16."
    )
    num_layers_at_end_in_bf16: int = _te(
        1, "Number of last layers that --first-last-layers-bf16 keeps in bf16."
    )
    fp4: str | None = _te(
        None, "fp4 format of GEMMs; excludes --fp8-format.", choices=("e2m1",), flag="--fp4-format"
    )
    fp4_recipe: str = _te("nvfp4", "Scaling recipe of fp4 tensors.", choices=("nvfp4",))

    @property
    def is_quantized(self) -> bool:
        """Whether the linear layers of transformer layers compute in fp8 or fp4."""
        return self.fp8 is not None or self.fp4 is not None

    @property
    def stores_codes(self) -> bool:
        """Whether --fp8-param-gather has an effect: with fp8 recipes of one scale per weight only.

        With blockwise scales, the shards of the distributed optimizer would split blocks.
        """
        return self.fp8_param and self.fp8 is not None and self.fp8_recipe in _ONE_SCALE

    @property
    def format_flag(self) -> str:
        """The flags, without leading dashes, that request fp8 or fp4, for error messages."""
        if self.fp4 is not None:
            return f"fp4-format {self.fp4}"
        return f"fp8-format {self.fp8} --fp8-recipe {self.fp8_recipe}"

    @property
    def width_multiple(self) -> int:
        """Required divisor of both dimensions of a rank's weight, from the GPU kernels."""
        return 32 if self.fp4 is None and self.fp8_recipe == "mxfp8" else 16

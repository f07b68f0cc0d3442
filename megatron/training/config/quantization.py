"""Flags for quantization of trained models: fake-quantized training, calibration and serving."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from megatron.core.config import flag_messages
from megatron.core.config.option import option
from megatron.core.quantization.formats import RECIPES
from megatron.core.quantization.quant_config import LayerRecipes, layer_recipes

_modelopt = partial(option, group="ModelOpt")
_kitchen = partial(option, group="kitchen")
_NONE = "None"  # ModelOpt's scripts pass it for no recipe


@dataclass(frozen=True, kw_only=True)
class QuantizationFlags:
    export_quant_cfg: str | None = _modelopt(
        None,
        "Quantization recipe of the linear layers, by ModelOpt's name: the model multiplies "
        "rounded weights and inputs, and its checkpoint holds their scales. Training continues "
        "with straight-through gradients (QAT); --load must name a calibrated checkpoint, see "
        "docs/quantization.md.",
        choices=(*RECIPES, _NONE),
    )
    export_real_quant_cfg: str | None = _modelopt(
        None,
        "ModelOpt's recipe of weights that are stored in low precision.",
        choices=("fp8_real_quant", "fp8_blockwise_real_quant", _NONE),
        ignored="a model that only serves always stores the weights of --export-quant-cfg as codes",
        harmless=(_NONE,),
    )
    export_kv_cache_quant: bool = _modelopt(
        False,
        "Quantize keys and values to fp8 with --export-quant-cfg, by a calibrated scale of each "
        "layer: training and generation round them, and exported folders hold the scales.",
    )
    kitchen_config_file: str | None = _kitchen(
        None,
        "YAML file that chooses the quantization recipe of each layer by globs, in the form of "
        "Megatron Core's recipe files or as a mapping of globs to recipes or 'none'. Layers that "
        "no glob matches have that of --export-quant-cfg.",
    )
    kitchen_recipe_number: int | None = _kitchen(
        None,
        "Numbered recipe of the kitchen package.",
        refused=flag_messages.KITCHEN,
    )

    @property
    def has_quantizers(self) -> bool:
        """Whether the model has quantizers, so that its checkpoints need scales."""
        return self.recipe_name is not None or self.kitchen_config_file is not None

    @property
    def recipe_name(self) -> str | None:
        """The recipe of layers that no glob matches; None: they are not quantized."""
        return None if self.export_quant_cfg == _NONE else self.export_quant_cfg

    @property
    def recipes(self) -> LayerRecipes | None:
        """The recipe of each layer; None without quantization.  Reads the file of globs."""
        return layer_recipes(self.recipe_name, self.kitchen_config_file)

"""Selection of the linear layers that compute in fp8 or fp4, and of their scaling recipe."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from megatron.core.config.errors import ConfigError
from megatron.core.low_precision import E2M1, E4M3, E5M2
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.params.param_info import info_of, set_info
from megatron.core.tensor_parallel.layers import Linear
from megatron.core.tensor_parallel.quantized_linear import Recipe
from megatron.core.transformer.config.precision import PrecisionConfig
from megatron.core.transformer.transformer_config import TransformerConfig


def quantize_layer(
    layer: nn.Module,
    config: TransformerConfig,
    layer_index: int,
    *,
    pg_collection: ProcessGroupCollection,
) -> None:
    """Let the linear layers of ``layer`` compute in fp8 or fp4, unless the layer stays in bf16.

    ``layer_index`` counts from 0 over the complete model.  Raises ConfigError for widths that the
    kernels do not support.
    """
    recipe = recipe_of(config)
    if recipe is None or stays_in_bf16(config, layer_index):
        return
    for name, linear in layer.named_modules():
        if isinstance(linear, Linear) and linear.weight is not None:
            multiple = config.width_multiple
            if any(size % multiple for size in linear.weight.shape):
                raise ConfigError(
                    f"layer {layer_index} {name}: a rank's weight of {tuple(linear.weight.shape)} "
                    f"is not a multiple of {multiple} in both dimensions, as "
                    f"--{config.format_flag} needs: change the widths or "
                    "--tensor-model-parallel-size"
                )
            info = info_of(linear.weight)
            if config.stores_codes:
                set_info(linear.weight, replace(info, gathered_as_codes=True))
            group = pg_collection.expt_tp if info.is_expert else pg_collection.tp_cp
            linear.quantize(recipe, group)


def recipe_of(config: PrecisionConfig) -> Recipe | None:
    """Return the quantization recipe of GEMM operands; None without fp8 and fp4."""
    wgrad = config.fp8_wgrad
    if config.fp4 is not None:
        return Recipe(E2M1, E2M1, block=16, wgrad=wgrad)
    if config.fp8 is None:
        return None
    backward = E5M2 if config.fp8 == "hybrid" else E4M3
    kind = config.fp8_recipe
    if kind in ("blockwise", "mxfp8"):
        is_square = kind == "blockwise"
        return Recipe(E4M3, backward, 128 if is_square else 32, is_square, wgrad=wgrad)
    if kind == "tensorwise":
        return Recipe(E4M3, backward, wgrad=wgrad)
    return Recipe(
        E4M3,
        backward,
        wgrad=wgrad,
        history=config.fp8_amax_history_len,
        takes_max=config.fp8_amax_compute_algo == "max",
        margin=config.fp8_margin,
    )


def stays_in_bf16(config: TransformerConfig, layer_index: int) -> bool:
    """Return whether --first-last-layers-bf16 keeps this layer in bf16."""
    first, last = config.num_layers_at_start_in_bf16, config.num_layers_at_end_in_bf16
    is_inner = first <= layer_index < config.num_layers - last
    return config.first_last_layers_bf16 and not is_inner

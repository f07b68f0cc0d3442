"""Layer specs of a GPT whose layers may differ in shape."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core.models.backends import BackendSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import (
    ENGINE,
    LOCAL,
    decoder_block_of,
    layers_on_this_stage,
    without_attention,
    without_mlp,
)
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import scatter_to_sequence_parallel_region
from megatron.core.transformer.heterogeneous.heterogeneous_config import (
    FULL,
    LINEAR,
    LayerShape,
    layer_shapes,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig


class LinearReplacement(ColumnParallelLinear):
    """Linear layer with the call signature of attention and MLP; ignores all but hidden states."""

    def __init__(self, config: TransformerConfig, *, tp_group: ProcessGroup) -> None:
        super().__init__(
            config.hidden_size,
            config.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            tp_group=tp_group,
            bias=False,
            gather_output=True,
        )

    def forward(self, input_: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, None]:
        """Multiply: [s, b, h] -> [s, b, h]; with sequence parallelism [s/tp, b, h] on both sides.

        Collective over tp.
        """
        y, _ = super().forward(input_)
        if self.sequence_parallel:
            y = scatter_to_sequence_parallel_region(y, self.tp_group)
        return y, None


def get_gpt_heterogeneous_layer_spec(
    config: TransformerConfig, use_te: bool = False
) -> TransformerBlockSubmodules:
    """Return a spec for every layer of this pipeline stage; see `get_gpt_decoder_block_spec`."""
    return layers_on_this_stage(heterogeneous_block_of(ENGINE if use_te else LOCAL, config), config)


def heterogeneous_block_of(
    backend: BackendSpecProvider, config: TransformerConfig
) -> TransformerBlockSubmodules:
    """Return a spec for every layer; all are equal if the config describes no differences."""
    block = decoder_block_of(backend, config)
    shapes = layer_shapes(config)
    if shapes is None or block.layer_specs is None:
        return block
    specs = list(map(_shaped, block.layer_specs, shapes))
    return TransformerBlockSubmodules(specs, block.layer_norm)


def _shaped(spec: Any, shape: LayerShape) -> ModuleSpec:
    """Return the layer of ``spec`` with the submodules that ``shape`` describes."""
    slots = spec.submodules
    if shape.attention == LINEAR:
        slots = replace(slots, self_attention=LinearReplacement)
    elif shape.attention != FULL:
        slots = without_attention(slots)
    if shape.mlp == FULL:
        mlp = replace(slots.mlp, params={"ffn_hidden_size": shape.ffn_hidden_size})
        slots = replace(slots, mlp=mlp)
    elif shape.mlp == LINEAR:
        slots = replace(slots, mlp=LinearReplacement)
    else:
        slots = without_mlp(slots)
    shaped: ModuleSpec = replace(spec, submodules=slots)
    return shaped

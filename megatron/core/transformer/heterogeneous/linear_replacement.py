"""One square matrix in the place of attention or of an MLP.

Collectives: the outputs, which are divided over the tensor-parallel group, are all-gathered.
"""

from __future__ import annotations

from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import scatter_to_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig


class LinearReplacement(ColumnParallelLinear):
    """Fills the slot of attention or MLP; what their calls carry beside hidden states is unused."""

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

    def forward(self, x: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, None]:
        """[s, b, h] -> [s, b, h], or [s/tp, b, h] -> [s/tp, b, h] where the sequence is cut."""
        y, _ = super().forward(x)
        if self.sequence_parallel:
            y = scatter_to_sequence_parallel_region(y, self.tp_group)
        return y, None

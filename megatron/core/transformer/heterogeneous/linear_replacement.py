"""Square linear layer that replaces attention or the MLP in a heterogeneous model.

Outputs are sharded over the tensor-parallel group, then all-gathered.
"""

from __future__ import annotations

from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import scatter_to_sequence_parallel_region
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

    def forward(self, x: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, None]:
        """Multiply: [s, b, h] -> [s, b, h]; with sequence parallelism [s/tp, b, h] on both sides.

        Collective over tp.
        """
        y, _ = super().forward(x)
        if self.sequence_parallel:
            y = scatter_to_sequence_parallel_region(y, self.tp_group)
        return y, None

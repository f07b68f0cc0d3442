"""Layers, collectives and random streams of tensor parallelism."""

from megatron.core.tensor_parallel.doors import broadcast_data as broadcast_data
from megatron.core.tensor_parallel.doors import (
    copy_to_tensor_model_parallel_region as copy_to_tensor_model_parallel_region,
)
from megatron.core.tensor_parallel.doors import (
    gather_from_sequence_parallel_region as gather_from_sequence_parallel_region,
)
from megatron.core.tensor_parallel.doors import (
    gather_from_tensor_model_parallel_region as gather_from_tensor_model_parallel_region,
)
from megatron.core.tensor_parallel.doors import (
    reduce_from_tensor_model_parallel_region as reduce_from_tensor_model_parallel_region,
)
from megatron.core.tensor_parallel.doors import (
    reduce_scatter_to_sequence_parallel_region as reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.doors import (
    scatter_to_sequence_parallel_region as scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.doors import (
    scatter_to_tensor_model_parallel_region as scatter_to_tensor_model_parallel_region,
)
from megatron.core.tensor_parallel.doors import (
    vocab_parallel_cross_entropy as vocab_parallel_cross_entropy,
)
from megatron.core.tensor_parallel.layers import ColumnParallelLinear as ColumnParallelLinear
from megatron.core.tensor_parallel.layers import RowParallelLinear as RowParallelLinear
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding as VocabParallelEmbedding
from megatron.core.tensor_parallel.random import checkpoint as checkpoint
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker as get_cuda_rng_tracker
from megatron.core.tensor_parallel.random import (
    model_parallel_cuda_manual_seed as model_parallel_cuda_manual_seed,
)

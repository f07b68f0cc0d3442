"""Data-parallel gradients and parameters."""

from megatron.core.distributed.distributed_data_parallel import (
    DistributedDataParallel as DistributedDataParallel,
)
from megatron.core.distributed.distributed_data_parallel_config import (
    DistributedDataParallelConfig as DistributedDataParallelConfig,
)
from megatron.core.distributed.finalize_model_grads import (
    finalize_model_grads as finalize_model_grads,
)

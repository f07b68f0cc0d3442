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
from megatron.core.lazy import lazy_exports

# Importing FSDP2 takes as long as the rest of torch: only runs that use it pay.
__getattr__ = lazy_exports(__name__, {"FullyShardedDataParallel": "megatron.core.distributed.fsdp"})

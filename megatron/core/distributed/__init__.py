"""Data parallelism: reduce gradients, gather parameters, shard both (DDP, FSDP2)."""

from megatron.core.distributed.distributed_data_parallel import (
    DistributedDataParallel as DistributedDataParallel,
)
from megatron.core.distributed.distributed_data_parallel_config import (
    DistributedDataParallelConfig as DistributedDataParallelConfig,
)
from megatron.core.distributed.finalize_model_grads import (
    finalize_model_grads as finalize_model_grads,
)
from megatron.core.optional import lazy_exports

# Imported at first use: importing FSDP2 takes as long as importing the rest of torch.
__getattr__ = lazy_exports(__name__, {"FullyShardedDataParallel": "megatron.core.distributed.fsdp"})

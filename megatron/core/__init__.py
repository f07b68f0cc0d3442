"""Library for training transformers: frozen typed configurations, explicit process groups."""

from megatron.core.compat.import_paths import install
from megatron.core.compat.names import NAMES
from megatron.core.optional import lazy_exports

__getattr__ = lazy_exports(
    __name__,
    {
        "mpu": "megatron.core.parallel.parallel_state",
        "parallel_state": "megatron.core.parallel.parallel_state",
        "tensor_parallel": "megatron.core.tensor_parallel",
        "dist_checkpointing": "megatron.core.dist_checkpointing",
        "InferenceParams": "megatron.core.inference.v014.contexts",
        "ModelParallelConfig": "megatron.core.model_parallel_config",
        "Timers": "megatron.core.diagnostics.timers",
    },
)
install(NAMES)

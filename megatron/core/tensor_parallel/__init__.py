"""Tensor parallelism: layers, collectives with gradients, and random number streams."""

from megatron.core.optional import lazy_exports

_NAMES = {
    "cross_entropy": "vocab_parallel_cross_entropy",
    "data": "broadcast_data",
    "layers": "ColumnParallelLinear RowParallelLinear VocabParallelEmbedding",
    "mappings": "all_gather_last_dim_from_tensor_parallel_region "
    "copy_to_tensor_model_parallel_region gather_from_sequence_parallel_region "
    "gather_from_tensor_model_parallel_region reduce_from_tensor_model_parallel_region "
    "reduce_scatter_last_dim_to_tensor_parallel_region "
    "reduce_scatter_to_sequence_parallel_region scatter_to_sequence_parallel_region "
    "scatter_to_tensor_model_parallel_region",
    "random": "CheckpointWithoutOutput checkpoint get_cuda_rng_tracker "
    "model_parallel_cuda_manual_seed",
}
_HOMES = {name: f"{__name__}.{home}" for home, names in _NAMES.items() for name in names.split()}
_MODULES = ("cross_entropy", "data", "layers", "mappings", "random")
__all__ = [*_HOMES]
__getattr__ = lazy_exports(__name__, _HOMES | {name: f"{__name__}.{name}" for name in _MODULES})

"""How gradients and parameters travel between data-parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config import states
from megatron.core.config.option import option


@dataclass(frozen=True, kw_only=True)
class DistributedDataParallelConfig:
    """How gradients and parameters travel between data-parallel ranks."""

    check_for_nan_in_grad: bool = option(  # and in the loss
        True,
        "Train on when a loss or gradient is NaN or infinite.",
        group="training",
        flag="--no-check-for-nan-in-loss-and-grad",
        dest="check_for_nan_in_loss_and_grad",
    )
    check_for_large_grads: bool = option(
        False,
        "Stop when a gradient is far larger than those seen before.",
        group="training",
        refused=states.RERUN,
    )
    grad_reduce_in_bf16: bool = option(
        False,
        "Sum gradients over replicas in bfloat16.",
        group="mixed precision",
    )
    grad_reduce_in_fp32: bool = option(
        False,
        "Add up and reduce gradients in fp32; on by itself under --bf16.",
        group="mixed precision",
        flag="--accumulate-allreduce-grads-in-fp32",
        dest="accumulate_allreduce_grads_in_fp32",
    )
    overlap_grad_reduce: bool = option(
        False,
        "Reduce gradients over replicas while backward goes on.",
        group="distributed",
    )
    align_grad_reduce: bool = option(
        True,
        "Let each pipeline stage start reducing gradients when it likes.",
        group="distributed",
    )
    ddp_num_buckets: int | None = option(
        None,
        "Number of buckets that gradients are reduced in.",
        group="distributed",
    )
    bucket_size: int | None = option(
        None,
        "Parameters in a bucket of gradients; the larger of 40 M and 1 M times the replicas"
        " if not given.",
        group="distributed",
        flag="--ddp-bucket-size",
        dest="ddp_bucket_size",
    )
    pad_buckets_for_high_nccl_busbw: bool = option(
        False,
        "Pad buckets of gradients to a multiple of a large power of 2.",
        group="distributed",
        flag="--ddp-pad-buckets-for-high-nccl-busbw",
        dest="ddp_pad_buckets_for_high_nccl_busbw",
    )
    average_in_collective: bool = option(
        False,
        "Let the collective divide gradients by the number of replicas.",
        group="distributed",
        flag="--ddp-average-in-collective",
        dest="ddp_average_in_collective",
    )
    overlap_param_gather: bool = option(
        False,
        "Gather sharded parameters while forward goes on.",
        group="distributed",
    )
    align_param_gather: bool = option(
        True,
        "Let each pipeline stage start gathering parameters when it likes.",
        group="distributed",
        ignored=states.ALWAYS_SO,
    )
    nccl_ub: bool = option(
        False,
        "Register gradient buffers with NCCL.",
        group="distributed",
        flag="--use-nccl-ub",
        ignored="NCCL copies through its own buffers here",
    )
    use_megatron_fsdp: bool = option(
        False,
        "Shard over the replicas what --data-parallel-sharding-strategy names.",
        group="distributed",
    )
    init_model_with_meta_device: bool = option(
        False,
        "Build the model without memory and fill it when it is sharded.",
        group="distributed",
    )
    data_parallel_sharding_strategy: str = option(
        "no_shard",
        "What --use-megatron-fsdp shards.",
        group="distributed",
        choices=("no_shard", "optim", "optim_grads", "optim_grads_params"),
    )
    gradient_reduce_div_fusion: bool = option(
        True,
        "Divide gradients apart from their reduction.",
        group="distributed",
    )
    fsdp_double_buffer: bool = option(
        False,
        "Keep two fixed buffers for gathered parameters.",
        group="distributed",
        ignored="gathered parameters take memory that PyTorch's allocator uses again",
    )
    suggested_communication_unit_size: int | None = option(
        None,
        "Elements that sharding gathers at a time.",
        group="distributed",
        ignored="each layer is gathered by itself",
    )
    keep_fp8_transpose_cache: bool = option(
        False,
        "Keep transposed fp8 weights between passes.",
        group="distributed",
        ignored="fp8 weights are kept once, and transposed where a product needs that",
    )
    enable_full_sharding_in_hsdp: bool = option(
        False,
        "Let instances of a sharded model hold a part each of its optimizer's state.",
        group="distributed",
    )
    num_distributed_optimizer_instances: int = option(
        1,
        "Groups of replicas that each hold a whole optimizer.",
        group="distributed",
    )
    use_torch_fsdp2: bool = option(
        False,
        "Shard parameters with PyTorch's FSDP2.",
        group="distributed",
    )
    torch_fsdp2_reshard_after_forward: bool = option(
        True,
        "Keep gathered parameters between forward and backward.",
        group="distributed",
        flag="--torch-fsdp2-no-reshard-after-forward",
    )
    # Scripts say it here as well as in OptimizerConfig, where its flag is.
    use_distributed_optimizer: bool = False

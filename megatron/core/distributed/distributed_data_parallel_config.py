"""How gradients and parameters travel between data-parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from megatron.core.config import flag_messages
from megatron.core.config.option import INT64_MAX, option

_distributed = partial(option, group="distributed")


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
        refused=flag_messages.RERUN,
    )
    grad_reduce_in_bf16: bool = option(
        False, "Sum gradients over replicas in bfloat16.", group="mixed precision"
    )
    grad_reduce_in_fp32: bool = option(
        False,
        "Add up and reduce gradients in fp32; on by itself under --bf16.",
        group="mixed precision",
        flag="--accumulate-allreduce-grads-in-fp32",
        dest="accumulate_allreduce_grads_in_fp32",
    )
    overlap_grad_reduce: bool = _distributed(
        False, "Reduce gradients over replicas while backward goes on."
    )
    align_grad_reduce: bool = _distributed(
        True, "Let each pipeline stage start reducing gradients when it likes."
    )
    ddp_num_buckets: int | None = _distributed(
        None, "Number of buckets that gradients are reduced in.", at_least=1
    )
    bucket_size: int | None = _distributed(
        None,
        "Parameters in a bucket of gradients; the larger of 40 M and 1 M times the replicas"
        " if not given.",
        flag="--ddp-bucket-size",
        dest="ddp_bucket_size",
        at_least=1,
        at_most=INT64_MAX,
    )
    pad_buckets_for_high_nccl_busbw: bool = _distributed(
        False,
        "Pad buckets of gradients to a multiple of a large power of 2.",
        flag="--ddp-pad-buckets-for-high-nccl-busbw",
        dest="ddp_pad_buckets_for_high_nccl_busbw",
    )
    average_in_collective: bool = _distributed(
        False,
        "Let the collective divide gradients by the number of replicas.",
        flag="--ddp-average-in-collective",
        dest="ddp_average_in_collective",
    )
    overlap_param_gather: bool = _distributed(
        False, "Gather sharded parameters while forward goes on."
    )
    align_param_gather: bool = _distributed(
        True,
        "Let each pipeline stage start gathering parameters when it likes.",
        ignored=flag_messages.ALWAYS_SO,
    )
    nccl_ub: bool = _distributed(
        False,
        "Allocate the buffers of gradients and parameters from NCCL and register them there; "
        "under FSDP it includes --fsdp-double-buffer.",
        flag="--use-nccl-ub",
    )
    use_megatron_fsdp: bool = _distributed(
        False, "Shard over the replicas what --data-parallel-sharding-strategy names."
    )
    init_model_with_meta_device: bool = _distributed(
        False, "Build the model without memory and fill it when it is sharded."
    )
    data_parallel_sharding_strategy: str = _distributed(
        "no_shard",
        "What --use-megatron-fsdp shards.",
        choices=("no_shard", "optim", "optim_grads", "optim_grads_params"),
    )
    gradient_reduce_div_fusion: bool = _distributed(
        True, "Divide gradients apart from their reduction."
    )
    fsdp_double_buffer: bool = _distributed(
        False,
        "Keep two fixed buffers for what fully sharded layers gather and reduce.",
    )
    suggested_communication_unit_size: int | None = _distributed(
        None,
        "Elements that sharding gathers at a time.",
        ignored="each layer is gathered by itself",
    )
    keep_fp8_transpose_cache: bool = _distributed(
        False,
        "Keep transposed fp8 weights between the micro-batches of a step, a byte a parameter.",
    )
    enable_full_sharding_in_hsdp: bool = _distributed(
        False, "Let instances of a sharded model hold a part each of its optimizer's state."
    )
    num_distributed_optimizer_instances: int = _distributed(
        1, "Groups of replicas that each hold a whole optimizer.", at_least=1
    )
    use_torch_fsdp2: bool = _distributed(False, "Shard parameters with PyTorch's FSDP2.")
    torch_fsdp2_reshard_after_forward: bool = _distributed(
        True,
        "Keep gathered parameters between forward and backward.",
        flag="--torch-fsdp2-no-reshard-after-forward",
    )
    # Scripts say it here as well as in OptimizerConfig, where its flag is.
    use_distributed_optimizer: bool = False

"""Configuration of gradient reduction and parameter sharding over data-parallel ranks."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from functools import partial

from megatron.core.config import flag_messages
from megatron.core.config.option import INT64_MAX, library_field, option
from megatron.core.config.rule import CheckedConfig, rules

_distributed = partial(option, group="distributed")


@dataclass(kw_only=True)
class DistributedDataParallelConfig(CheckedConfig):
    """Configuration of gradient reduction and parameter sharding over data-parallel ranks.

    Projects derive dataclasses from it and assign to its fields before they wrap the model.
    """

    check_for_nan_in_grad: bool = option(  # and in the loss
        False,
        "Do not check loss and gradients for NaN and infinity; training continues if they occur.",
        group="training",
        default=True,
        flag="--no-check-for-nan-in-loss-and-grad",
        dest="check_for_nan_in_loss_and_grad",
    )
    check_for_large_grads: bool = option(
        False,
        "Compute a step again if the norm of a rank's gradients is 10 times the largest one of "
        "the first 100 buckets.",
        group="training",
    )
    grad_reduce_in_bf16: bool = option(
        False,
        "Reduce gradients over data-parallel ranks in bf16; needs --bf16.",
        group="mixed precision",
    )
    grad_reduce_in_fp32: bool = option(
        False,
        "Accumulate and reduce gradients in fp32; default with --bf16 unless "
        "--grad-reduce-in-bf16 or --main-grads-dtype bf16.",
        group="mixed precision",
        flag="--accumulate-allreduce-grads-in-fp32",
        dest="accumulate_allreduce_grads_in_fp32",
    )
    overlap_grad_reduce: bool = _distributed(
        False, "Overlap gradient reduction with the backward pass."
    )
    align_grad_reduce: bool = _distributed(
        True, "Do not align the start of gradient reduction across pipeline stages."
    )
    ddp_num_buckets: int | None = _distributed(
        None, "Number of gradient buckets; excludes --ddp-bucket-size.", at_least=1
    )
    bucket_size: int | None = _distributed(
        None,
        "Parameters per gradient bucket; max(40M, 1M x data-parallel size) if not given. "
        "Excludes --ddp-num-buckets.",
        flag="--ddp-bucket-size",
        dest="ddp_bucket_size",
        at_least=1,
        at_most=INT64_MAX,
    )
    pad_buckets_for_high_nccl_busbw: bool = _distributed(
        False,
        "Pad gradient buckets to a multiple of a large power of 2, for NCCL bandwidth.",
        flag="--ddp-pad-buckets-for-high-nccl-busbw",
        dest="ddp_pad_buckets_for_high_nccl_busbw",
    )
    average_in_collective: bool = _distributed(
        False,
        "Average gradients inside the collective instead of scaling them before it.",
        flag="--ddp-average-in-collective",
        dest="ddp_average_in_collective",
    )
    overlap_param_gather: bool = _distributed(
        False,
        "Overlap the parameter all-gather with the forward pass; needs "
        "--use-distributed-optimizer and --overlap-grad-reduce.",
    )
    align_param_gather: bool = _distributed(
        False,
        "Do not align the start of the parameter all-gather across pipeline stages.",
        flag="--no-align-param-gather",
        default=True,
        ignored=flag_messages.ALWAYS_SO,
    )
    nccl_ub: bool = _distributed(
        False,
        "Allocate gradient and parameter buffers with NCCL's allocator and register them; "
        "with FSDP it implies --fsdp-double-buffer.",
        flag="--use-nccl-ub",
    )
    use_megatron_fsdp: bool = _distributed(
        False,
        "Shard over data-parallel ranks as --data-parallel-sharding-strategy says; excludes "
        "--use-torch-fsdp2.",
    )
    init_model_with_meta_device: bool = _distributed(
        False, "Build the model on the meta device and initialize it after sharding; needs FSDP."
    )
    data_parallel_sharding_strategy: str = _distributed(
        "no_shard",
        "What --use-megatron-fsdp shards: nothing (no_shard), optimizer state (optim), also "
        "gradients (optim_grads), also parameters (optim_grads_params).",
        choices=("no_shard", "optim", "optim_grads", "optim_grads_params"),
    )
    megatron_fsdp_grad_comm_dtype: str = _distributed(
        "auto",
        "Type in which --use-megatron-fsdp reduces gradients: fp32, the default, or bf16, as "
        "--grad-reduce-in-bf16.",
        choices=("fp32", "bf16", "auto"),
    )
    gradient_reduce_div_fusion: bool = _distributed(
        True, "Do not fuse gradient averaging into the reduce-scatter of FSDP."
    )
    fsdp_double_buffer: bool = _distributed(
        False,
        "Use two persistent communication buffers for the all-gather and reduce-scatter of FSDP.",
    )
    suggested_communication_unit_size: int | None = _distributed(
        None,
        "Elements per FSDP all-gather.",
        ignored="each layer is gathered by itself",
    )
    keep_fp8_transpose_cache: bool = _distributed(
        False,
        "Keep transposed fp8 weights between the micro-batches of a step, for one byte per "
        "parameter.",
    )
    enable_full_sharding_in_hsdp: bool = _distributed(
        False,
        "Shard optimizer state over the instances of a hybrid-sharded model too; needs "
        "--num-distributed-optimizer-instances 2 or more.",
    )
    outer_dp_sharding_strategy: str = _distributed(
        "no_shard",
        "What the instances of a hybrid-sharded model share: nothing, or optimizer state (optim), "
        "as --enable-full-sharding-in-hsdp.",
        choices=("no_shard", "optim"),
    )
    num_distributed_optimizer_instances: int = _distributed(
        1,
        "Number of groups of data-parallel ranks that each hold a complete copy of the "
        "optimizer state.",
        at_least=1,
    )
    use_torch_fsdp2: bool = _distributed(
        False,
        "Shard parameters, gradients and optimizer state with FSDP2 (fully_shard); excludes "
        "--use-megatron-fsdp and --use-distributed-optimizer.",
    )
    torch_fsdp2_reshard_after_forward: bool = _distributed(
        True,
        "Keep all-gathered parameters between forward and backward instead of freeing them.",
        flag="--torch-fsdp2-no-reshard-after-forward",
    )
    # Megatron-LM's constructor has these too; the flag of the first is a field of OptimizerConfig.
    use_distributed_optimizer: bool = False
    use_custom_fsdp: bool = library_field(False, "its name is use_megatron_fsdp", refused=True)
    fp8_param_gather: bool = library_field(False, "TransformerConfig.fp8_param decides")
    delay_wgrad_compute: bool = library_field(
        False, "TransformerConfig.delay_wgrad_compute decides"
    )
    reuse_grad_buf_for_mxfp8_param_ag: bool = library_field(
        False, "parameters are gathered into their own buffer"
    )
    preserve_fp32_weights: bool = library_field(True, "the optimizer keeps main parameters in fp32")
    disable_symmetric_registration: bool = library_field(False, "nccl_ub decides")

    RULES = rules(
        {
            "--ddp-num-buckets and --ddp-bucket-size both set "
            "the bucket size: keep one": lambda c: (
                c.ddp_num_buckets is not None and c.bucket_size is not None
            ),
            "--use-torch-fsdp2 and --use-megatron-fsdp exclude each other: keep the first for "
            "full sharding, the second to choose it by --data-parallel-sharding-strategy": None,
        }
    )
    LIBRARY_RULES = rules(
        {
            "preserve_fp32_weights=False: FSDP always stores parameters in fp32": lambda c: (
                c.use_megatron_fsdp and not c.preserve_fp32_weights
            ),
        }
    )


# -- what data-parallel ranks shard, from the configuration or arguments with the same names -----

Config = DistributedDataParallelConfig | Namespace


def is_fully_sharded(config: Config) -> bool:
    """Return whether parameters are sharded (`FullyShardedDataParallel`)."""
    by_strategy = config.data_parallel_sharding_strategy in ("optim_grads", "optim_grads_params")
    return bool(config.use_torch_fsdp2 or (config.use_megatron_fsdp and by_strategy))


def reshards_after_forward(config: Config) -> bool:
    """Return whether FSDP frees gathered parameters between forward and backward."""
    if config.use_torch_fsdp2:
        return bool(config.torch_fsdp2_reshard_after_forward)
    return bool(config.data_parallel_sharding_strategy == "optim_grads_params")


def shares_instances(config: Config) -> bool:
    """Return whether instances of a sharded model (HSDP) divide the update of their common part."""
    by_strategy = config.outer_dp_sharding_strategy == "optim"
    is_asked = config.enable_full_sharding_in_hsdp or by_strategy
    return bool(
        is_asked
        and config.use_megatron_fsdp
        and is_fully_sharded(config)
        and num_instances(config) > 1
    )


def num_instances(config: Config) -> int:
    """Return the number of groups of ranks that each hold a complete optimizer state.

    1 if nothing is sharded.
    """
    is_sharded = config.use_distributed_optimizer or is_fully_sharded(config)
    return int(config.num_distributed_optimizer_instances) if is_sharded else 1


def share_of(numel: int, rank: int, num_ranks: int) -> tuple[int, int]:
    """Return (start, stop) of the share of ``rank``.

    The shares have equal length, except that the last ones may be shorter or empty.

    >>> [share_of(7, rank, 3) for rank in range(3)]
    [(0, 3), (3, 6), (6, 7)]
    """
    width = -(-numel // num_ranks)
    return min(rank * width, numel), min((rank + 1) * width, numel)

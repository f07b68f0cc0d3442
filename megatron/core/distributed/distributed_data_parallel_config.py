"""How gradients and parameters travel between data-parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config.option import option


@dataclass(frozen=True, kw_only=True)
class DistributedDataParallelConfig:
    """How gradients and parameters travel between data-parallel ranks."""

    check_for_nan_in_loss_and_grad: bool = option(True, "", group="training")
    check_for_large_grads: bool = option(False, "", group="training")
    grad_reduce_in_bf16: bool = option(False, "", group="mixed precision")
    grad_reduce_in_fp32: bool = option(
        False,
        "",
        group="mixed precision",
        flag="--accumulate-allreduce-grads-in-fp32",
        dest="accumulate_allreduce_grads_in_fp32",
    )
    overlap_grad_reduce: bool = option(False, "", group="distributed")
    align_grad_reduce: bool = option(True, "", group="distributed")
    ddp_num_buckets: int | None = option(None, "", group="distributed")
    ddp_bucket_size: int | None = option(None, "", group="distributed")
    ddp_pad_buckets_for_high_nccl_busbw: bool = option(False, "", group="distributed")
    ddp_average_in_collective: bool = option(False, "", group="distributed")
    overlap_param_gather: bool = option(False, "", group="distributed")
    align_param_gather: bool = option(True, "", group="distributed")
    nccl_ub: bool = option(False, "", group="distributed", flag="--use-nccl-ub")
    use_megatron_fsdp: bool = option(False, "", group="distributed")
    init_model_with_meta_device: bool = option(False, "", group="distributed")
    data_parallel_sharding_strategy: str = option(
        "no_shard",
        "",
        group="distributed",
        choices=("no_shard", "optim", "optim_grads", "optim_grads_params"),
    )
    gradient_reduce_div_fusion: bool = option(True, "", group="distributed")
    fsdp_double_buffer: bool = option(False, "", group="distributed")
    suggested_communication_unit_size: int | None = option(None, "", group="distributed")
    keep_fp8_transpose_cache: bool = option(False, "", group="distributed")
    enable_full_sharding_in_hsdp: bool = option(False, "", group="distributed")
    num_distributed_optimizer_instances: int = option(1, "", group="distributed")
    use_torch_fsdp2: bool = option(False, "", group="distributed")
    torch_fsdp2_reshard_after_forward: bool = option(
        True,
        "",
        group="distributed",
        flag="--torch-fsdp2-no-reshard-after-forward",
    )

"""Requirements of flags of parallel layouts and communication; see `flag_requirements`."""

from __future__ import annotations

from megatron.core.distributed.sharding import is_fully_sharded, shares_instances
from megatron.training.arguments.requirement import needs, needs_flag

OF_LAYOUT = (
    needs(
        "--distributed-backend nccl",
        "high_priority_stream_groups nccl_communicator_config_path nccl_ub",
        lambda ns: ns.distributed_backend in (None, "nccl"),
    ),
    needs_flag("sequence_parallel", "tp_comm_overlap"),
    needs_flag(
        "tp_comm_overlap",
        "tp_comm_overlap_ag tp_comm_overlap_rs tp_comm_overlap_rs_dgrad tp_comm_split_ag "
        "tp_comm_split_rs",
    ),
    needs(
        "--tp-comm-overlap and --transformer-impl transformer_engine",
        "tp_comm_overlap_cfg tp_comm_bulk_dgrad tp_comm_bulk_wgrad tp_comm_bootstrap_backend",
        lambda ns: ns.tp_comm_overlap and ns.transformer_impl == "transformer_engine",
    ),
    needs(
        "--context-parallel-size of 2 or more",
        "cp_comm_type",
        lambda ns: ns.context_parallel_size > 1,
    ),
    needs(
        "--context-parallel-size of 2 or more and --cp-comm-type a2a+p2p",
        "hierarchical_context_parallel_sizes",
        lambda ns: ns.context_parallel_size > 1 and "a2a+p2p" in ns.cp_comm_type,
    ),
    needs(
        "--pipeline-model-parallel-size of 2 or more",
        "overlap_p2p_comm overlap_p2p_comm_warmup_flush align_grad_reduce pipeline_schedule "
        "pipeline_split encoder_pipeline_model_parallel_size "
        "account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split "
        "defer_embedding_wgrad_compute",
        lambda ns: ns.pipeline_model_parallel_size > 1,
    ),
    needs_flag("defer_embedding_wgrad_compute", "wgrad_deferral_limit"),
    needs(
        "virtual stages of --pipeline-schedule interleaved",
        "microbatch_group_size_per_vp_stage",
        lambda ns: (
            ns.virtual_pipeline_model_parallel_size is not None and ns.pipeline_schedule != "zb-v"
        ),
    ),
    needs(
        "--use-distributed-optimizer",
        "overlap_param_gather overlap_param_gather_with_optimizer_step "
        "num_distributed_optimizer_instances",
        lambda ns: ns.use_distributed_optimizer or is_fully_sharded(ns),
    ),
    needs_flag("use_torch_fsdp2", "torch_fsdp2_reshard_after_forward"),
    needs_flag("use_megatron_fsdp", "data_parallel_sharding_strategy"),
    needs(
        "--use-megatron-fsdp with fully sharded parameters and "
        "--num-distributed-optimizer-instances 2 or more",
        "enable_full_sharding_in_hsdp",
        shares_instances,
    ),
    needs(
        "fully sharded parameters (--use-torch-fsdp2, or --use-megatron-fsdp with "
        "--data-parallel-sharding-strategy optim_grads or optim_grads_params)",
        "gradient_reduce_div_fusion init_model_with_meta_device fsdp_double_buffer",
        is_fully_sharded,
    ),
    needs(
        "complete parameters on each data-parallel rank, which FSDP does not keep",
        "check_weight_hash_across_dp_replicas_interval",
        lambda ns: not is_fully_sharded(ns),
    ),
    needs(
        "gradient buckets; FSDP reduces gradients layer by layer in backward",
        "overlap_param_gather overlap_param_gather_with_optimizer_step overlap_grad_reduce "
        "align_grad_reduce ddp_num_buckets ddp_bucket_size ddp_pad_buckets_for_high_nccl_busbw "
        "ddp_average_in_collective",
        lambda ns: not is_fully_sharded(ns),
    ),
)

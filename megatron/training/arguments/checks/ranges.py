"""Numbers that have a smallest value, in one table."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.training.arguments.sections import flags_and_defaults
from megatron.training.config.run import RunConfig

# dests
AT_LEAST_1 = """
    micro_batch_size global_batch_size num_layers decoder_num_layers decoder_seq_length
    hidden_size muon_num_ns_steps mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads
    ffn_hidden_size num_attention_heads kv_channels seq_length max_position_embeddings
    make_vocab_size_divisible_by vocab_size padded_vocab_size rotary_base hysteresis
    loss_scale_window lr_decay_iters lr_decay_samples lr_wsd_decay_iters lr_wsd_decay_samples seed
    log_interval tensorboard_log_interval tensorboard_queue_size eval_interval exit_interval
    save_interval save_retain_interval non_persistent_save_interval replication_jump
    replication_factor keep_last_checkpoints fp8_amax_history_len train_sync_interval
    check_weight_hash_across_dp_replicas_interval log_params_hash_interval
    moe_upcycling_granularity num_dataset_builder_threads straggler_ctrlr_port
    straggler_minmax_count virtual_ranks distributed_timeout_minutes ddp_num_buckets
    ddp_bucket_size num_distributed_optimizer_instances recompute_num_layers
    tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size
    expert_model_parallel_size rotary_scaling_factor yarn_original_max_position_embeddings
""".split()
AT_LEAST_0 = """
    loss_chunk_size mtp_num_layers mtp_loss_scaling_factor vocab_extra_ids norm_epsilon
    init_method_std embedding_init_method_std embedding_scale weight_decay clip_grad sgd_momentum
    train_iters train_samples lr_warmup_iters lr_warmup_samples eval_iters exit_duration_in_mins
    ckpt_max_failed_saves num_layers_at_start_in_bf16 num_layers_at_end_in_bf16
    wgrad_deferral_limit ckpt_step manual_gc_interval num_workers mid_level_dataset_surplus
    min_lr
""".split()
LAST_PORT = 65535
LONGEST_TIMEOUT_MINUTES = 365 * 24 * 60
AT_LEAST = {**dict.fromkeys(AT_LEAST_1, 1), **dict.fromkeys(AT_LEAST_0, 0)}


def numbers_are_large_enough(run: RunConfig) -> Iterator[str]:
    """Sizes and intervals are at least 1, counts and amounts at least 0."""
    for dest, least in AT_LEAST.items():
        value = run.asked[dest]
        if value is not None and value < least:
            yield f"{flags_and_defaults()[dest][0]} {value}: at least {least} is needed"


def collectives_time_out(run: RunConfig) -> Iterator[str]:
    """Libraries count a time-out in nanoseconds, with 64 bits."""
    minutes = run.distributed.distributed_timeout_minutes
    if minutes > LONGEST_TIMEOUT_MINUTES:
        yield (
            f"--distributed-timeout-minutes {minutes}: at most {LONGEST_TIMEOUT_MINUTES}, a year, "
            "is possible"
        )


def straggler_port_is_a_port(run: RunConfig) -> Iterator[str]:
    """TCP has 16 bits for a port."""
    port = run.resilience.straggler_ctrlr_port
    if port > LAST_PORT:
        yield f"--straggler-ctrlr-port {port}: at most {LAST_PORT} is possible"


def one_way_to_count_buckets(run: RunConfig) -> Iterator[str]:
    """The number of buckets follows from their size."""
    d = run.ddp
    if d.ddp_num_buckets is not None and d.bucket_size is not None:
        yield "--ddp-num-buckets and --ddp-bucket-size exclude each other: keep one"

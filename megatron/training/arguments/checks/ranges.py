"""Numbers that have a smallest value, in one table."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.training.config.run import RunConfig

# dest -> (flag, smallest value)
AT_LEAST: dict[str, tuple[str, float]] = {
    "micro_batch_size": ("--micro-batch-size", 1),
    "global_batch_size": ("--global-batch-size", 1),
    "num_layers": ("--num-layers", 1),
    "decoder_num_layers": ("--decoder-num-layers", 1),
    "decoder_seq_length": ("--decoder-seq-length", 1),
    "hidden_size": ("--hidden-size", 1),
    "muon_num_ns_steps": ("--muon-num-ns-steps", 1),
    "loss_chunk_size": ("--loss-chunk-size", 0),
    "mtp_num_layers": ("--mtp-num-layers", 0),
    "mtp_loss_scaling_factor": ("--mtp-loss-scaling-factor", 0),
    "mamba_state_dim": ("--mamba-state-dim", 1),
    "mamba_head_dim": ("--mamba-head-dim", 1),
    "mamba_num_groups": ("--mamba-num-groups", 1),
    "mamba_num_heads": ("--mamba-num-heads", 1),
    "ffn_hidden_size": ("--ffn-hidden-size", 1),
    "num_attention_heads": ("--num-attention-heads", 1),
    "kv_channels": ("--kv-channels", 1),
    "seq_length": ("--seq-length", 1),
    "max_position_embeddings": ("--max-position-embeddings", 1),
    "make_vocab_size_divisible_by": ("--make-vocab-size-divisible-by", 1),
    "vocab_size": ("--vocab-size", 1),
    "padded_vocab_size": ("--padded-vocab-size", 1),
    "vocab_extra_ids": ("--vocab-extra-ids", 0),
    "rotary_base": ("--rotary-base", 1),
    "norm_epsilon": ("--norm-epsilon", 0),
    "init_method_std": ("--init-method-std", 0),
    "embedding_init_method_std": ("--embedding-init-method-std", 0),
    "embedding_scale": ("--embedding-scale", 0),
    "weight_decay": ("--weight-decay", 0),
    "clip_grad": ("--clip-grad", 0),
    "sgd_momentum": ("--sgd-momentum", 0),
    "hysteresis": ("--hysteresis", 1),
    "loss_scale_window": ("--loss-scale-window", 1),
    "train_iters": ("--train-iters", 0),
    "train_samples": ("--train-samples", 0),
    "lr_decay_iters": ("--lr-decay-iters", 1),
    "lr_decay_samples": ("--lr-decay-samples", 1),
    "lr_warmup_iters": ("--lr-warmup-iters", 0),
    "lr_warmup_samples": ("--lr-warmup-samples", 0),
    "lr_wsd_decay_iters": ("--lr-wsd-decay-iters", 1),
    "lr_wsd_decay_samples": ("--lr-wsd-decay-samples", 1),
    "seed": ("--seed", 1),
    "log_interval": ("--log-interval", 1),
    "tensorboard_log_interval": ("--tensorboard-log-interval", 1),
    "tensorboard_queue_size": ("--tensorboard-queue-size", 1),
    "eval_interval": ("--eval-interval", 1),
    "eval_iters": ("--eval-iters", 0),
    "exit_interval": ("--exit-interval", 1),
    "exit_duration_in_mins": ("--exit-duration-in-mins", 0),
    "save_interval": ("--save-interval", 1),
    "save_retain_interval": ("--save-retain-interval", 1),
    "non_persistent_save_interval": ("--non-persistent-save-interval", 1),
    "replication_jump": ("--replication-jump", 1),
    "replication_factor": ("--replication-factor", 1),
    "keep_last_checkpoints": ("--keep-last-checkpoints", 1),
    "ckpt_max_failed_saves": ("--ckpt-max-failed-saves", 0),
    "fp8_amax_history_len": ("--fp8-amax-history-len", 1),
    "num_layers_at_start_in_bf16": ("--num-layers-at-start-in-bf16", 0),
    "num_layers_at_end_in_bf16": ("--num-layers-at-end-in-bf16", 0),
    "wgrad_deferral_limit": ("--wgrad-deferral-limit", 0),
    "ckpt_step": ("--ckpt-step", 0),
    "train_sync_interval": ("--train-sync-interval", 1),
    "manual_gc_interval": ("--manual-gc-interval", 0),
    "check_weight_hash_across_dp_replicas_interval": (
        "--check-weight-hash-across-dp-replicas-interval",
        1,
    ),
    "log_params_hash_interval": ("--log-params-hash-interval", 1),
    "moe_upcycling_granularity": ("--moe-upcycling-granularity", 1),
    "num_workers": ("--num-workers", 0),
    "num_dataset_builder_threads": ("--num-dataset-builder-threads", 1),
    "mid_level_dataset_surplus": ("--mid-level-dataset-surplus", 0),
    "straggler_ctrlr_port": ("--straggler-ctrlr-port", 1),
    "straggler_minmax_count": ("--straggler-minmax-count", 1),
    "virtual_ranks": ("--virtual-ranks", 1),
    "distributed_timeout_minutes": ("--distributed-timeout-minutes", 1),
    "ddp_num_buckets": ("--ddp-num-buckets", 1),
    "ddp_bucket_size": ("--ddp-bucket-size", 1),
    "num_distributed_optimizer_instances": ("--num-distributed-optimizer-instances", 1),
    "recompute_num_layers": ("--recompute-num-layers", 1),
}


def numbers_are_large_enough(run: RunConfig) -> Iterator[str]:
    """Sizes and intervals are at least 1, counts and amounts at least 0."""
    for dest, (flag, least) in AT_LEAST.items():
        value = run.asked[dest]
        if value is not None and value < least:
            yield f"{flag} {value}: at least {least} is needed"


def one_way_to_count_buckets(run: RunConfig) -> Iterator[str]:
    """The number of buckets follows from their size."""
    d = run.ddp
    if d.ddp_num_buckets is not None and d.bucket_size is not None:
        yield "--ddp-num-buckets and --ddp-bucket-size exclude each other: keep one"


CHECKS = (numbers_are_large_enough, one_way_to_count_buckets)

"""Flags that need another flag to do anything: given alone, they get one warning.

A table, so that a flag which is accepted is never without effect in silence.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping
from typing import Any

from megatron.core.config.errors import ConfigError
from megatron.core.distributed.sharding import is_fully_sharded, shares_instances
from megatron.core.ssm.mamba_hybrid_layer_allocation import ATTENTION, EXPERTS, MLP, layer_pattern
from megatron.training.arguments.needs import NEEDS_OF_LAYERS, FlagRequirement
from megatron.training.arguments.optimizer_needs import NEEDS_GPU, NEEDS_OF_OPTIMIZER
from megatron.training.models.registry import model_kind


def _has_layer(ns: Namespace, letter: str) -> bool:
    """Whether a layer of this kind is in the model; all kinds but hybrids have all of them."""
    if not model_kind(ns.model_kind).is_hybrid:
        return True
    ratios = ns.hybrid_attention_ratio, ns.hybrid_mlp_ratio
    try:
        return letter in layer_pattern(ns.num_layers or 0, *ratios, ns.hybrid_override_pattern)
    except ConfigError:  # it is told elsewhere
        return True


NEEDS_OF_HYBRIDS = (
    FlagRequirement(
        "an attention layer, * in --hybrid-override-pattern",
        "apply_query_key_layer_scaling attention_dropout attn_logit_softcapping "
        "group_query_attention no_rope_freq num_query_groups qk_layernorm rotary_base "
        "rotary_percent softmax_type window_attn_skip_freq window_size",
        lambda ns: _has_layer(ns, ATTENTION),
    ),
    FlagRequirement(
        "an MLP layer, - or E in --hybrid-override-pattern",
        "ffn_hidden_size squared_relu swiglu",
        lambda ns: _has_layer(ns, MLP) or _has_layer(ns, EXPERTS),
    ),
    FlagRequirement(
        "--hybrid-override-pattern to be unset",
        "hybrid_attention_ratio hybrid_mlp_ratio",
        lambda ns: not model_kind(ns.model_kind).is_hybrid or ns.hybrid_override_pattern is None,
    ),
)

NEEDS = (
    *NEEDS_OF_OPTIMIZER,
    FlagRequirement(
        "--position-embedding-type rope",
        "rotary_base rotary_percent rotary_interleaved rope_type "
        "rotary_seq_len_interpolation_factor use_rope_scaling no_rope_freq",
    ),
    FlagRequirement("--position-embedding-type learned_absolute", "reset_position_ids"),
    FlagRequirement(
        "--position-embedding-type relative",
        "relative_attention_num_buckets relative_attention_max_distance",
    ),
    FlagRequirement(
        "pretrain_bert.py or pretrain_t5.py",
        "mask_prob short_seq_prob",
        lambda ns: model_kind(ns.model_kind).masks_tokens,
    ),
    FlagRequirement(
        "pretrain_t5.py (--model-kind t5)",
        "decoder_num_layers decoder_seq_length encoder_pipeline_model_parallel_size",
        lambda ns: model_kind(ns.model_kind).has_encoder,
    ),
    FlagRequirement(
        "pretrain_bert.py (--model-kind bert)",
        "bert_binary_head",
        lambda ns: model_kind(ns.model_kind).has_masked_lm_head,
    ),
    FlagRequirement(
        "--tokenizer-type BertWordPiece..., SentencePieceTokenizer or HuggingFaceTokenizer",
        "vocab_extra_ids",
        lambda ns: (
            str(ns.tokenizer_type).startswith("BertWordPiece")
            or ns.tokenizer_type in ("SentencePieceTokenizer", "HuggingFaceTokenizer")
        ),
    ),
    FlagRequirement("--mtp-num-layers", "mtp_loss_scaling_factor"),
    FlagRequirement("--overlap-moe-expert-parallel-comm", "delay_wgrad_compute"),
    FlagRequirement("--recompute-granularity adaptive", "memory_budget_fraction"),
    FlagRequirement(
        "--fp8-format", "fp8_recipe keep_fp8_transpose_cache", lambda ns: ns.fp8 is not None
    ),
    FlagRequirement(
        "--fp8-format and --use-distributed-optimizer, which all-gathers updated parameters",
        "fp8_param_gather",
        lambda ns: ns.fp8 is not None and ns.use_distributed_optimizer and not is_fully_sharded(ns),
    ),
    FlagRequirement(
        "--fp8-recipe delayed or tensorwise, which have one scale per weight: optimizer shards do "
        "not align with the blocks of other recipes",
        "fp8_param_gather",
        lambda ns: ns.fp8 is None or ns.fp8_recipe not in ("blockwise", "mxfp8"),
    ),
    FlagRequirement(
        "--fp8-format or --fp4-format",
        "fp8_wgrad first_last_layers_bf16",
        lambda ns: ns.fp8 is not None or ns.fp4 is not None,
    ),
    FlagRequirement(
        "--fp8-format and --fp8-recipe delayed",
        "fp8_margin fp8_amax_history_len fp8_amax_compute_algo",
        lambda ns: ns.fp8 is not None and ns.fp8_recipe == "delayed",
    ),
    FlagRequirement(
        "--first-last-layers-bf16", "num_layers_at_start_in_bf16 num_layers_at_end_in_bf16"
    ),
    FlagRequirement(
        "--model-kind mamba, which pretrain_mamba.py sets",
        "mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads hybrid_attention_ratio "
        "hybrid_mlp_ratio hybrid_override_pattern",
        lambda ns: model_kind(ns.model_kind).is_hybrid,
    ),
    FlagRequirement("--use-rope-scaling", "rope_scaling_factor"),
    FlagRequirement("--group-query-attention", "num_query_groups"),
    FlagRequirement(
        "--use-distributed-optimizer",
        "overlap_param_gather overlap_param_gather_with_optimizer_step "
        "num_distributed_optimizer_instances",
        lambda ns: ns.use_distributed_optimizer or is_fully_sharded(ns),
    ),
    FlagRequirement(
        "--distributed-backend nccl",
        "high_priority_stream_groups nccl_communicator_config_path nccl_ub",
        lambda ns: ns.distributed_backend in (None, "nccl"),
    ),
    FlagRequirement(
        "--log-straggler",
        "disable_straggler_on_startup straggler_ctrlr_port straggler_minmax_count",
    ),
    FlagRequirement("--cpu-offloading", "cpu_offloading_num_layers"),
    FlagRequirement(
        "--enable-cuda-graph or --external-cuda-graph",
        "cuda_graph_warmup_steps cuda_graph_scope",
        lambda ns: ns.enable_cuda_graph or ns.external_cuda_graph,
    ),
    FlagRequirement("--manual-gc", "manual_gc_interval manual_gc_eval"),
    FlagRequirement(
        "--profile", "profile_step_start profile_step_end profile_ranks use_pytorch_profiler"
    ),
    FlagRequirement(
        "training steps, which --skip-train omits", "rehearse_memory", lambda ns: not ns.skip_train
    ),
    FlagRequirement("--record-memory-history", "memory_snapshot_path"),
    FlagRequirement(
        "--save",
        "save_interval save_retain_interval keep_last_checkpoints ckpt_max_failed_saves "
        "ckpt_incremental async_save no_save_optim no_save_rng",
    ),
    FlagRequirement("--non-persistent-ckpt-type global", "non_persistent_global_ckpt_dir"),
    FlagRequirement(
        "--non-persistent-ckpt-type local",
        "non_persistent_local_ckpt_dir non_persistent_local_ckpt_algo",
    ),
    FlagRequirement("--replication", "replication_jump replication_factor"),
    FlagRequirement("--async-save", "async_save_when_busy"),
    FlagRequirement("--load", "no_load_optim no_load_rng use_checkpoint_opt_param_scheduler"),
    FlagRequirement("--use-checkpoint-args", "use_tokenizer_model_from_checkpoint_args"),
    FlagRequirement(
        "--tokenizer-type TikTokenizer",
        "tiktoken_pattern tiktoken_num_special_tokens tiktoken_special_tokens",
    ),
    FlagRequirement(
        "--wandb-project", "wandb_exp_name wandb_save_dir", lambda ns: bool(ns.wandb_project)
    ),
    FlagRequirement(
        "--context-parallel-size", "cp_comm_type", lambda ns: ns.context_parallel_size > 1
    ),
    FlagRequirement(
        "--context-parallel-size and --cp-comm-type a2a+p2p",
        "hierarchical_context_parallel_sizes",
        lambda ns: ns.context_parallel_size > 1 and "a2a+p2p" in ns.cp_comm_type,
    ),
    FlagRequirement(
        "--pipeline-model-parallel-size of 2 or more",
        "overlap_p2p_comm overlap_p2p_comm_warmup_flush align_grad_reduce pipeline_schedule "
        "pipeline_split encoder_pipeline_model_parallel_size "
        "account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split "
        "defer_embedding_wgrad_compute",
        lambda ns: ns.pipeline_model_parallel_size > 1,
    ),
    FlagRequirement("--defer-embedding-wgrad-compute", "wgrad_deferral_limit"),
    FlagRequirement(
        "virtual stages of --pipeline-schedule interleaved",
        "microbatch_group_size_per_vp_stage",
        lambda ns: (
            ns.virtual_pipeline_model_parallel_size is not None and ns.pipeline_schedule != "zb-v"
        ),
    ),
    FlagRequirement("--use-torch-fsdp2", "torch_fsdp2_reshard_after_forward"),
    FlagRequirement("--use-megatron-fsdp", "data_parallel_sharding_strategy"),
    FlagRequirement(
        "--use-megatron-fsdp with fully sharded parameters and "
        "--num-distributed-optimizer-instances 2 or more",
        "enable_full_sharding_in_hsdp",
        shares_instances,
    ),
    FlagRequirement(
        "fully sharded parameters (--use-torch-fsdp2, or --use-megatron-fsdp with "
        "--data-parallel-sharding-strategy optim_grads or optim_grads_params)",
        "gradient_reduce_div_fusion init_model_with_meta_device fsdp_double_buffer",
        is_fully_sharded,
    ),
    FlagRequirement(
        "complete parameters on each data-parallel rank, which FSDP does not keep",
        "check_weight_hash_across_dp_replicas_interval",
        lambda ns: not is_fully_sharded(ns),
    ),
    FlagRequirement(
        "gradient buckets; FSDP reduces gradients layer by layer in backward",
        "overlap_param_gather overlap_param_gather_with_optimizer_step overlap_grad_reduce "
        "align_grad_reduce ddp_num_buckets ddp_bucket_size ddp_pad_buckets_for_high_nccl_busbw "
        "ddp_average_in_collective",
        lambda ns: not is_fully_sharded(ns),
    ),
    *NEEDS_OF_LAYERS,
    FlagRequirement("--check-only", "check_world_size check_rank check_device_memory_gib"),
)


def without_effect(
    ns: Namespace, flags: dict[str, tuple[str, Any]], given: dict[str, Any]
) -> Iterator[str]:
    """A warning for each flag that was given and that nothing will read.

    ``ns`` is the derived namespace, ``given`` the parsed one, ``flags`` maps a dest to its flag
    and default.
    """
    for need in (*NEEDS, *NEEDS_OF_HYBRIDS):
        if not need.is_met(ns):
            yield from _told(need, flags, given)


def without_effect_on_a_cpu(
    flags: dict[str, tuple[str, Any]], given: Mapping[str, Any]
) -> Iterator[str]:
    """The same where --device auto has found no GPU."""
    yield from _told(NEEDS_GPU, flags, given)


def _told(
    need: FlagRequirement, flags: dict[str, tuple[str, Any]], given: Mapping[str, Any]
) -> Iterator[str]:
    for dest in need.flags:
        flag, default = flags[dest]
        if given.get(dest, default) != default:
            yield f"{flag} is without effect: it needs {need.words}"

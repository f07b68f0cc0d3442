"""Flags that have an effect only together with another flag.

A flag that is given without the other one causes one warning (table `NEEDS`).
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import fields

from megatron.core.config.errors import ConfigError
from megatron.core.device import CPU
from megatron.core.distributed.sharding import is_fully_sharded
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.ssm.mamba_hybrid_layer_allocation import ATTENTION, EXPERTS, MLP, layer_pattern
from megatron.training.arguments.fine_tuning_flag_requirements import OF_FINE_TUNING
from megatron.training.arguments.image_flag_requirements import OF_IMAGES
from megatron.training.arguments.layout_flag_requirements import OF_LAYOUT
from megatron.training.arguments.requirement import (
    FlagRequirement,
    needs,
    needs_flag,
    needs_value,
)
from megatron.training.arguments.sections import flags_and_defaults
from megatron.training.config.resilience import RESTART_FLAGS
from megatron.training.models.registry import model_kind


def _rule_of_vectors(ns: Namespace) -> object:
    """Return the optimizer of parameters that are not matrices."""
    return ns.muon_scalar_optimizer if "muon" in ns.optimizer else ns.optimizer


def _has_layer(ns: Namespace, *letters: str) -> bool:
    """Return whether the model has a layer of one of these kinds; only hybrids may lack some."""
    if not model_kind(ns.model_kind).is_hybrid:
        return True
    ratios = ns.hybrid_attention_ratio, ns.hybrid_mlp_ratio
    try:
        pattern = layer_pattern(ns.num_layers or 0, *ratios, ns.hybrid_override_pattern)
    except ConfigError:  # a check reports it
        return True
    return any(letter in pattern for letter in letters)


NEEDS_GPU = needs(
    "a GPU",
    "optimizer_cpu_offload enable_cuda_graph external_cuda_graph cpu_offloading moe_grouped_gemm "
    "record_memory_history high_priority_stream_groups nccl_communicator_config_path "
    "moe_router_fusion nccl_ub tp_comm_overlap",
    lambda ns: ns.device != CPU,
)

_OF_OPTIMIZER = (
    needs_value("optimizer", "sgd", "sgd_momentum"),
    needs(
        "--optimizer adam, or --muon-scalar-optimizer adam",
        "adam_beta1 adam_beta2 adam_eps",
        lambda ns: _rule_of_vectors(ns) not in ("sgd", "lion"),  # user-defined ones may read them
    ),
    needs(
        "--optimizer lion, or --muon-scalar-optimizer lion",
        "lion_beta1 lion_beta2",
        lambda ns: _rule_of_vectors(ns) not in ("adam", "sgd"),
    ),
    needs(
        "--optimizer muon",
        " ".join(
            f.name
            for f in fields(OptimizerConfig)
            if f.name.startswith("muon_") and f.name not in ("muon_tp_mode", "muon_use_syrk")
        ),
        lambda ns: "muon" in ns.optimizer,
    ),
    needs(
        "--optimizer muon and --tensor-model-parallel-size of 2 or more",
        "muon_tp_mode",
        lambda ns: "muon" in ns.optimizer and ns.tensor_model_parallel_size > 1,
    ),
    needs(
        "--bf16 with main parameters, or --main-grads-dtype, --main-params-dtype, --exp-avg-dtype "
        "or --exp-avg-sq-dtype below fp32",
        "use_precision_aware_optimizer",
        lambda ns: (
            (ns.bf16 and not is_fully_sharded(ns))
            or {ns.main_grads_dtype, ns.main_params_dtype, ns.exp_avg_dtype, ns.exp_avg_sq_dtype}
            != {"fp32"}
        ),
    ),
    needs(
        "--fp16 without --loss-scale",
        "initial_loss_scale min_loss_scale loss_scale_window hysteresis",
        lambda ns: ns.fp16 and ns.loss_scale is None,
    ),
    needs_value(
        "lr_decay_style", "WSD", "lr_wsd_decay_style lr_wsd_decay_iters lr_wsd_decay_samples"
    ),
    needs_flag(
        "optimizer_cpu_offload",
        "optimizer_offload_fraction overlap_cpu_optimizer_d2h_h2d pin_cpu_grads pin_cpu_params",
    ),
    NEEDS_GPU,
)

_OF_MODEL = (
    needs(
        "--position-embedding-type rope or mrope",
        "rotary_base rotary_percent rotary_interleaved rotary_seq_len_interpolation_factor "
        "no_rope_freq",
        lambda ns: ns.multi_latent_attention or ns.position_embedding_type in ("rope", "mrope"),
    ),
    needs(
        "--position-embedding-type rope",
        "rope_type use_rope_scaling",
        lambda ns: ns.multi_latent_attention or ns.position_embedding_type == "rope",
    ),
    needs_value("position_embedding_type", "rope", "window_rotary_base"),
    needs_flag("window_size", "window_rotary_base"),
    needs_value("position_embedding_type", "mrope", "mrope_section"),
    needs_value("position_embedding_type", "learned_absolute", "reset_position_ids"),
    needs_value(
        "position_embedding_type",
        "relative",
        "relative_attention_num_buckets relative_attention_max_distance",
    ),
    needs(
        "pretrain_bert.py or pretrain_t5.py",
        "mask_prob short_seq_prob",
        lambda ns: model_kind(ns.model_kind).masks_tokens,
    ),
    needs(
        "pretrain_t5.py (--model-kind t5) or pretrain_vlm.py (--model-kind vlm)",
        "decoder_num_layers decoder_seq_length",
        lambda ns: model_kind(ns.model_kind).has_encoder or model_kind(ns.model_kind).reads_images,
    ),
    needs(
        "pretrain_t5.py (--model-kind t5)",
        "encoder_pipeline_model_parallel_size",
        lambda ns: model_kind(ns.model_kind).has_encoder,
    ),
    needs(
        "pretrain_bert.py (--model-kind bert)",
        "bert_binary_head",
        lambda ns: model_kind(ns.model_kind).has_masked_lm_head,
    ),
    needs(
        "--model-kind mamba, which pretrain_mamba.py sets",
        "mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads hybrid_attention_ratio "
        "hybrid_mlp_ratio hybrid_override_pattern",
        lambda ns: model_kind(ns.model_kind).is_hybrid,
    ),
    needs_flag("mtp_num_layers", "mtp_loss_scaling_factor"),
    needs_flag("use_rope_scaling", "rope_scaling_factor"),
    needs_flag("group_query_attention", "num_query_groups"),
    needs(
        "--swiglu, --geglu or --quick-geglu",
        "activation_func_clamp_value glu_linear_offset",
        lambda ns: ns.gated_linear_unit,
    ),
    needs_flag(
        "multi_latent_attention",
        "q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim cache_mla_latents",
    ),
    needs(
        "--multi-latent-attention or --rope-type yarn",
        "rotary_scaling_factor mscale mscale_all_dim",
        lambda ns: ns.multi_latent_attention or ns.rope_type == "yarn",
    ),
    needs(
        "--rope-type yarn",
        "yarn_original_max_position_embeddings yarn_beta_fast yarn_beta_slow "
        "yarn_correction_range_round_to_int",
        lambda ns: ns.rope_type == "yarn" or (ns.multi_latent_attention and ns.rope_type is None),
    ),
)

_OF_EXPERTS = (
    needs_flag(
        "num_experts",
        "expert_tensor_parallel_size moe_aux_loss_coeff moe_apply_probs_on_input "
        "moe_enable_deepep moe_expert_capacity_factor moe_ffn_hidden_size moe_input_jitter_eps "
        "moe_grouped_gemm moe_layer_freq moe_layer_recompute moe_pad_expert_input_to_capacity "
        "moe_per_layer_logging moe_router_dtype moe_router_fusion "
        "moe_router_enable_expert_bias "
        "moe_router_force_load_balancing moe_router_group_topk moe_router_group_score_topk "
        "moe_router_load_balancing_type moe_router_num_groups moe_router_pre_softmax "
        "moe_router_score_function moe_router_topk moe_router_topk_scaling_factor "
        "moe_shared_expert_gate moe_shared_expert_intermediate_size moe_token_dispatcher_type "
        "moe_z_loss_coeff",
    ),
    needs_flag("moe_shared_expert_intermediate_size", "moe_shared_expert_overlap"),
    needs_flag("moe_enable_deepep", "moe_deepep_num_sms"),
    needs_flag("moe_use_upcycling", "moe_upcycling_granularity"),
    needs_flag("moe_expert_capacity_factor", "moe_token_drop_policy"),
    needs_flag("moe_router_enable_expert_bias", "moe_router_bias_update_rate"),
    needs_flag("overlap_moe_expert_parallel_comm", "delay_wgrad_compute"),
    needs(
        "a --moe-router-load-balancing-type other than sinkhorn and none",
        "moe_aux_loss_coeff",
        lambda ns: not {"sinkhorn", "none"}.intersection(ns.moe_router_load_balancing_type),
    ),
    needs_value("moe_router_score_function", "softmax", "moe_router_pre_softmax"),
    needs(
        "a --moe-router-load-balancing-type other than sinkhorn",
        "moe_router_pre_softmax",
        lambda ns: "sinkhorn" not in ns.moe_router_load_balancing_type,
    ),
    needs(
        "routing by score, which --moe-router-force-load-balancing replaces",
        "moe_router_enable_expert_bias moe_router_group_score_topk moe_router_group_topk "
        "moe_router_num_groups",
        lambda ns: not ns.moe_router_force_load_balancing,
    ),
    needs(
        "router logits in fp32: --moe-router-dtype fp32, or neither --bf16 nor --fp16",
        "moe_router_fusion",
        lambda ns: (
            ns.moe_router_dtype == "fp32"
            or (ns.moe_router_dtype is None and not (ns.bf16 or ns.fp16))
        ),
    ),
)

_OF_PRECISION = (
    needs("--fp8-format", "fp8_recipe keep_fp8_transpose_cache", lambda ns: ns.fp8 is not None),
    needs(
        "--fp8-format and --use-distributed-optimizer, which all-gathers updated parameters",
        "fp8_param_gather",
        lambda ns: ns.fp8 is not None and ns.use_distributed_optimizer and not is_fully_sharded(ns),
    ),
    needs(
        "--fp8-recipe delayed or tensorwise, which have one scale per weight: optimizer shards do "
        "not align with the blocks of other recipes",
        "fp8_param_gather",
        lambda ns: ns.fp8 is None or ns.fp8_recipe not in ("blockwise", "mxfp8"),
    ),
    needs(
        "--fp8-format or --fp4-format",
        "fp8_wgrad first_last_layers_bf16",
        lambda ns: ns.fp8 is not None or ns.fp4 is not None,
    ),
    needs(
        "--fp8-format and --fp8-recipe delayed",
        "fp8_margin fp8_amax_history_len fp8_amax_compute_algo",
        lambda ns: ns.fp8 is not None and ns.fp8_recipe == "delayed",
    ),
    needs_flag("first_last_layers_bf16", "num_layers_at_start_in_bf16 num_layers_at_end_in_bf16"),
)

_OF_MEMORY_AND_SPEED = (
    needs_value("recompute_granularity", "adaptive", "memory_budget_fraction"),
    needs_flag("cpu_offloading", "cpu_offloading_num_layers"),
    needs(
        "--enable-cuda-graph or --external-cuda-graph",
        "cuda_graph_warmup_steps cuda_graph_scope",
        lambda ns: ns.enable_cuda_graph or ns.external_cuda_graph,
    ),
    needs_flag("manual_gc", "manual_gc_interval manual_gc_eval"),
    needs(
        "training steps, which --skip-train omits", "rehearse_memory", lambda ns: not ns.skip_train
    ),
)

_OF_FILES_AND_REPORTS = (
    needs("--error-injection-rate", "error_injection_type", lambda ns: ns.error_injection_rate > 0),
    needs_value("rerun_mode", "validate_results", "error_injection_rate"),
    needs(
        "--tokenizer-type BertWordPiece..., SentencePieceTokenizer or HuggingFaceTokenizer",
        "vocab_extra_ids",
        lambda ns: (
            str(ns.tokenizer_type).startswith("BertWordPiece")
            or ns.tokenizer_type in ("SentencePieceTokenizer", "HuggingFaceTokenizer")
        ),
    ),
    needs_value(
        "tokenizer_type",
        "TikTokenizer",
        "tiktoken_pattern tiktoken_num_special_tokens tiktoken_special_tokens",
    ),
    needs_value("dataloader_type", "external", "dataloader_save"),
    needs_value(
        "tokenizer_type",
        "MultimodalTokenizer",
        "tokenizer_prompt_format special_tokens image_tag_type force_system_message",
    ),
    needs_flag(
        "save",
        "save_interval save_retain_interval keep_last_checkpoints ckpt_max_failed_saves "
        "ckpt_incremental async_save no_save_optim no_save_rng",
    ),
    needs_value("non_persistent_ckpt_type", "global", "non_persistent_global_ckpt_dir"),
    needs(
        "--non-persistent-ckpt-type local or in_memory",
        "non_persistent_local_ckpt_dir non_persistent_local_ckpt_algo",
        lambda ns: ns.non_persistent_ckpt_type in ("local", "in_memory"),
    ),
    needs_flag("replication", "replication_jump replication_factor"),
    needs_flag("async_save", "async_save_when_busy"),
    needs_flag("load", "no_load_optim no_load_rng use_checkpoint_opt_param_scheduler"),
    needs_flag("use_checkpoint_args", "use_tokenizer_model_from_checkpoint_args"),
    needs("--wandb-project", "wandb_exp_name wandb_save_dir", lambda ns: bool(ns.wandb_project)),
    needs_flag(
        "log_straggler", "disable_straggler_on_startup straggler_ctrlr_port straggler_minmax_count"
    ),
    needs(
        "--enable-ft-package and --save",
        "calc_ft_timeouts",
        lambda ns: ns.enable_ft_package and ns.save is not None,
    ),
    needs_flag("profile", "profile_step_start profile_step_end profile_ranks use_pytorch_profiler"),
    needs_flag("inprocess_restart", " ".join(f.name for f in RESTART_FLAGS)),
    needs_flag("record_memory_history", "memory_snapshot_path"),
    needs_flag("check_only", "check_world_size check_rank check_device_memory_gib"),
)

_OF_HYBRIDS = (
    needs(
        "an attention layer, * in --hybrid-override-pattern",
        "apply_query_key_layer_scaling attention_dropout attn_logit_softcapping "
        "group_query_attention no_rope_freq num_query_groups qk_layernorm rotary_base "
        "rotary_percent softmax_type window_attn_skip_freq window_rotary_base window_size",
        lambda ns: _has_layer(ns, ATTENTION),
    ),
    needs(
        "an MLP layer, - or E in --hybrid-override-pattern",
        "ffn_hidden_size squared_relu swiglu",
        lambda ns: _has_layer(ns, MLP, EXPERTS),
    ),
    needs(
        "layers chosen by ratios, which --hybrid-override-pattern replaces",
        "hybrid_attention_ratio hybrid_mlp_ratio",
        lambda ns: not model_kind(ns.model_kind).is_hybrid or ns.hybrid_override_pattern is None,
    ),
)

NEEDS = (
    *_OF_OPTIMIZER,
    *_OF_MODEL,
    *OF_IMAGES,
    *OF_FINE_TUNING,
    *_OF_EXPERTS,
    *_OF_PRECISION,
    *OF_LAYOUT,
    *_OF_MEMORY_AND_SPEED,
    *_OF_FILES_AND_REPORTS,
)


def without_effect(ns: Namespace, given: Mapping[str, object]) -> Iterator[str]:
    """Yield a warning for each given flag that has no effect.

    ``ns`` is the derived namespace, ``given`` the parsed one.
    """
    for need in (*NEEDS, *_OF_HYBRIDS):
        if not need.is_met(ns):
            yield from _warnings(need, given)


def without_effect_on_a_cpu(given: Mapping[str, object]) -> Iterator[str]:
    """Yield a warning for each given flag that needs a GPU; --device auto found none."""
    yield from _warnings(NEEDS_GPU, given)


def _warnings(need: FlagRequirement, given: Mapping[str, object]) -> Iterator[str]:
    for dest in need.flags:
        flag, default = flags_and_defaults()[dest]
        if given.get(dest, default) != default:
            yield f"{flag} is without effect: it needs {need.words}"

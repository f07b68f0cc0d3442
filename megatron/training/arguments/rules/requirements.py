"""Flags that have an effect only together with another flag.

A flag that is given without the other one causes one warning.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

from megatron.core.config.option import dest_of, options_of
from megatron.core.config.parse import parse_table
from megatron.core.device import CPU
from megatron.core.distributed.distributed_data_parallel_config import shares_instances
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.ssm.mamba_hybrid_layer_allocation import ATTENTION, EXPERTS, MLP
from megatron.training.arguments.rules.rule import Settings, needs
from megatron.training.config.mimo import MimoConfig
from megatron.training.config.resilience import RESTART_FLAGS
from megatron.training.config.retro import RetroFlags
from megatron.training.config.rl import RL_FLAGS
from megatron.training.config.run import SFT
from megatron.training.config.vision import ImageClassifierConfig, VisionConfig


def _optimizer_of_vectors(c: Settings) -> object:
    """Return the optimizer of parameters that are not matrices."""
    return c.muon_scalar_optimizer if c.has_matrix_rule else c.optimizer


NEEDS_GPU = needs(
    "a GPU",
    "optimizer_cpu_offload enable_cuda_graph external_cuda_graph cuda_graph_impl cpu_offloading "
    "fine_grained_activation_offloading moe_grouped_gemm record_memory_history "
    "high_priority_stream_groups nccl_communicator_config_path moe_router_fusion nccl_ub "
    "tp_comm_overlap",
    lambda c: c.device != CPU,
)

_SHARED = ("img_h", "img_w", "patch_dim", "broken_samples")

# Flags, with the values that count if not all do, and the dests that have no effect without them.
_FLAGS_NEEDED = parse_table(
    """
--optimizer sgd | sgd_momentum
--hybrid-context-parallel | max_seqlen_per_dp_cp_rank
--lr-decay-style WSD | lr_wsd_decay_style lr_wsd_decay_iters lr_wsd_decay_samples
--optimizer-cpu-offload | optimizer_offload_fraction overlap_cpu_optimizer_d2h_h2d pin_cpu_grads
    pin_cpu_params
--multi-latent-attention or --position-embedding-type rope or mrope | rotary_base rotary_percent
    rotary_interleaved rotary_seq_len_interpolation_factor no_rope_freq
--multi-latent-attention or --position-embedding-type rope | rope_type use_rope_scaling
--position-embedding-type rope | window_rotary_base
--window-size | window_rotary_base
--position-embedding-type mrope | mrope_section mrope_interleaved
--position-embedding-type learned_absolute | reset_position_ids
--position-embedding-type relative | relative_attention_num_buckets relative_attention_max_distance
--experimental-attention-variant gated_delta_net, gdn or kda | linear_attention_freq
    linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim linear_num_key_heads
    linear_num_value_heads linear_norm_epsilon linear_allow_neg_eigval
--experimental-attention-variant dsa | dsa_indexer_n_heads dsa_indexer_head_dim dsa_indexer_topk
    dsa_indexer_loss_coeff dsa_indexer_k_norm_epsilon dsa_indexer_rope_interleaved
    dsa_indexer_topk_freq dsa_indexer_skip_topk_offset
--enable-mhc-connections | mhc_num_residual_streams mhc_init_gating_factor mhc_sinkhorn_iterations
    mhc_recompute_layer_num
--mtp-num-layers | mtp_loss_scaling_factor mtp_use_repeated_layer mtp_detach_heads
--export-num-eagle-layers | export_eagle_algorithm
--export-draft-vocab-size | export_draft_vocab_data
--export-quant-cfg or --kitchen-config-file | export_kv_cache_quant
--export-eagle-algorithm eagle3 | export_draft_vocab_size export_eagle_ffn_hidden_size
--export-num-mtp or --export-num-eagle-layers | export_freeze_mtp
--use-rope-scaling | rope_scaling_factor
--group-query-attention | num_query_groups
--swiglu, --geglu or --quick-geglu | activation_func_clamp_value glu_linear_offset
--multi-latent-attention | q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim
    cache_mla_latents mla_latent_norm_epsilon
--qk-clip | qk_clip_alpha qk_clip_threshold
--use-mup | mup_base_hidden_size mup_base_head_dim mup_attn_scale_power mup_embedding_mult
    mup_output_mult
--multi-latent-attention or --rope-type yarn | rotary_scaling_factor mscale mscale_all_dim
--num-experts | expert_tensor_parallel_size moe_aux_loss_coeff moe_apply_probs_on_input
    moe_enable_deepep moe_expert_capacity_factor moe_ffn_hidden_size moe_input_jitter_eps
    moe_latent_size moe_enable_routing_replay moe_num_hash_layers
    moe_grouped_gemm moe_layer_freq moe_layer_recompute moe_pad_expert_input_to_capacity
    moe_per_layer_logging moe_router_dtype moe_router_fusion moe_router_enable_expert_bias
    moe_router_force_load_balancing moe_router_group_topk moe_router_group_score_topk
    moe_router_load_balancing_type moe_router_num_groups moe_router_pre_softmax
    moe_router_score_function moe_router_topk moe_router_topk_scaling_factor moe_shared_expert_gate
    moe_shared_expert_intermediate_size moe_token_dispatcher_type moe_z_loss_coeff
--moe-shared-expert-intermediate-size | moe_shared_expert_overlap
--moe-token-dispatcher-type flex | moe_flex_dispatcher_backend
--moe-enable-deepep | moe_deepep_num_sms
--moe-use-upcycling | moe_upcycling_granularity
--moe-expert-capacity-factor | moe_token_drop_policy
--moe-router-enable-expert-bias | moe_router_bias_update_rate
--overlap-moe-expert-parallel-comm | delay_wgrad_compute
--moe-router-score-function softmax | moe_router_pre_softmax
--fp8-format | fp8_recipe keep_fp8_transpose_cache
--fp8-format or --fp4-format | fp8_wgrad first_last_layers_bf16
--fp8-format and --fp8-recipe delayed | fp8_margin fp8_amax_history_len fp8_amax_compute_algo
--first-last-layers-bf16 | num_layers_at_start_in_bf16 num_layers_at_end_in_bf16
--cpu-offloading | cpu_offloading_num_layers
--fine-grained-activation-offloading | offload_modules activation_offload_fraction
    min_offloaded_tensor_size
--enable-cuda-graph or --external-cuda-graph | cuda_graph_warmup_steps cuda_graph_scope
    cuda_graph_modules
--manual-gc | manual_gc_interval manual_gc_eval
--rerun-mode validate_results | error_injection_rate
--tokenizer-type BertWordPieceLowerCase, BertWordPieceCase, SentencePieceTokenizer or
    HuggingFaceTokenizer | vocab_extra_ids
--tokenizer-type TikTokenizer | tiktoken_pattern tiktoken_num_special_tokens tiktoken_special_tokens
--dataloader-type external | dataloader_save
--fim-data | fim_rate fim_spm_rate fim_split_sample fim_fragment_rate fim_no_prefix
    fim_prefix_token fim_middle_token fim_suffix_token
--fim-split-sample | fim_fragment_rate
--tokenizer-type MultimodalTokenizer | tokenizer_prompt_format special_tokens image_tag_type
    force_system_message
--save | save_interval ckpt_max_failed_saves async_save no_save_optim no_save_rng
--save or --save-hf-interval | save_retain_interval keep_last_checkpoints
--save-best or --early-stopping-patience | best_metric
--early-stopping-patience | early_stopping_min_delta
--non-persistent-ckpt-type global | non_persistent_global_ckpt_dir
--non-persistent-ckpt-type local or in_memory | non_persistent_local_ckpt_dir
    non_persistent_local_ckpt_algo
--replication | replication_jump replication_factor
--async-save | async_save_when_busy
--load | no_load_optim no_load_rng use_checkpoint_opt_param_scheduler
--use-checkpoint-args | use_tokenizer_model_from_checkpoint_args
--wandb-project | wandb_entity wandb_exp_name wandb_save_dir
--tracker | tracker_project tracker_run
--log-straggler | disable_straggler_on_startup straggler_ctrlr_port straggler_minmax_count
--enable-ft-package and --save | calc_ft_timeouts
--profile | profile_step_start profile_step_end profile_ranks use_pytorch_profiler
--record-memory-history | memory_snapshot_path
--check-only | check_world_size check_rank check_device_memory_gib
--model-provider video_llava_vlm | num_frames
--model-provider llava_avlm | audio_encoder_model audio_seq_length
--sft, --dpo-beta or --reward-model | sft_packing sft_long_conversations sft_alignment
    sft_show_sample
--eval-generate | eval_generate_tokens
--dpo-beta | dpo_loss_type dpo_label_smoothing
--tokenizer-type SFTTokenizer | sft_tokenizer_prompt_format
--lora-rank | lora_alpha lora_base_dtype lora_dropout lora_target_modules lora_use_rslora
    lora_use_dora lora_modules_to_save
--logits-save-dir | logits_save_top_k logits_save_top_p logits_save_top_p_min_k logits_save_dtype
--logits-save-top-p | logits_save_top_p_min_k
--logits-load-dir | logits_load_kd_loss_alpha logits_load_ignore_errors
--rl-inference-logprobs-is-correction | rl_importance_sampling_truncation_coef
--sequence-parallel | tp_comm_overlap
--tp-comm-overlap | tp_comm_overlap_ag tp_comm_overlap_rs tp_comm_overlap_rs_dgrad tp_comm_split_ag
    tp_comm_split_rs
--tp-comm-overlap and --transformer-impl transformer_engine | tp_comm_overlap_cfg tp_comm_bulk_dgrad
    tp_comm_bulk_wgrad tp_comm_bootstrap_backend
--defer-embedding-wgrad-compute | wgrad_deferral_limit
--use-torch-fsdp2 | torch_fsdp2_reshard_after_forward
--use-megatron-fsdp | data_parallel_sharding_strategy megatron_fsdp_grad_comm_dtype
"""
)

_MUON = [
    f.name
    for f in fields(OptimizerConfig)
    if f.name.startswith("muon_")
    and f.name not in ("muon_tp_mode", "muon_use_syrk", "muon_scalar_optimizer")
]


def _dests_of(config_class: type) -> list[str]:
    """Return the dests of the flags of a section that have an effect."""
    return [dest_of(f, opt) for f, opt in options_of(config_class) if opt.ignored is None]


_RETRO_FLAGS = [dest for dest in _dests_of(RetroFlags) if dest != "retro_add_retriever"]
# What the dests behind the bar need, and whether a run has it.
_NEEDS: dict[str, Callable[[Settings], object]] = {
    # User-defined optimizers may read them.
    "--optimizer adam, or --muon-scalar-optimizer adam "
    "| adam_beta1 adam_beta2 adam_eps": lambda c: _optimizer_of_vectors(c) not in ("sgd", "lion"),
    "--optimizer lion, or --muon-scalar-optimizer lion | lion_beta1 lion_beta2": lambda c: (
        _optimizer_of_vectors(c) not in ("adam", "sgd")
    ),
    f"--optimizer muon | {' '.join(_MUON)}": lambda c: "muon" in c.optimizer,
    "--optimizer muon or soap | muon_scalar_optimizer": lambda c: c.has_matrix_rule,
    "--optimizer soap | soap_shampoo_beta soap_precondition_frequency": lambda c: (
        c.optimizer == "soap"
    ),
    "pretraining of a left-to-right language model on data files | "
    "index_free fim_data pack_documents": lambda c: c.reads_documents,
    "pretraining or SFT of a left-to-right language model on data files | "
    "log_loss_by_source": lambda c: (
        c.reads_documents or c.config.objective == SFT and not c.mock_data
    ),
    "--optimizer muon and --tensor-model-parallel-size of 2 or more | muon_tp_mode": lambda c: (
        "muon" in c.optimizer and c.tensor_model_parallel_size > 1
    ),
    "--bf16 with main parameters, or --main-grads-dtype, --main-params-dtype, --exp-avg-dtype "
    "or --exp-avg-sq-dtype below fp32 | use_precision_aware_optimizer": lambda c: (
        (c.bf16 and not c.is_fully_sharded)
        or {c.main_grads_dtype, c.main_params_dtype, c.exp_avg_dtype, c.exp_avg_sq_dtype}
        != {"fp32"}
    ),
    "--fp16 without --loss-scale | initial_loss_scale min_loss_scale loss_scale_window "
    "hysteresis": lambda c: c.fp16 and c.loss_scale is None,
    "pretrain_bert.py or pretrain_t5.py | mask_prob short_seq_prob": lambda c: c.kind.masks_tokens,
    "pretrain_t5.py (--model-kind t5) or pretrain_vlm.py (--model-kind vlm) | "
    "decoder_num_layers decoder_seq_length": lambda c: c.kind.has_encoder or c.kind.reads_images,
    "pretrain_t5.py (--model-kind t5) | encoder_pipeline_model_parallel_size": lambda c: (
        c.kind.has_encoder
    ),
    "pretrain_bert.py (--model-kind bert) | bert_binary_head": lambda c: c.kind.has_masked_lm_head,
    "--model-kind mamba, which pretrain_mamba.py sets | mamba_state_dim mamba_head_dim "
    "mamba_num_groups mamba_num_heads hybrid_attention_ratio hybrid_mlp_ratio "
    "hybrid_override_pattern mtp_hybrid_override_pattern": lambda c: c.kind.is_hybrid,
    "--rope-type yarn | yarn_original_max_position_embeddings yarn_beta_fast yarn_beta_slow "
    "yarn_query_scaling_beta yarn_correction_range_round_to_int": lambda c: (
        c.rope_type == "yarn" or (c.multi_latent_attention and c.rope_type is None)
    ),
    "a --moe-router-load-balancing-type other "
    "than sinkhorn and none | moe_aux_loss_coeff": lambda c: (
        not {"sinkhorn", "none"}.intersection(c.load_balancing_types)
    ),
    "a --moe-router-load-balancing-type other than sinkhorn | moe_router_pre_softmax": lambda c: (
        "sinkhorn" not in c.load_balancing_types
    ),
    "routing by score, which --moe-router-force-load-balancing replaces | "
    "moe_router_enable_expert_bias moe_router_group_score_topk moe_router_group_topk "
    "moe_router_num_groups": lambda c: not c.moe_router_force_load_balancing,
    "router logits in fp32: --moe-router-dtype fp32, or neither --bf16 nor --fp16 | "
    "moe_router_fusion": lambda c: (
        c.moe_router_dtype == "fp32" or (c.moe_router_dtype is None and not (c.bf16 or c.fp16))
    ),
    "--fp8-format and --use-distributed-optimizer, which all-gathers updated parameters | "
    "fp8_param_gather": lambda c: (
        c.fp8 is not None and c.use_distributed_optimizer and not c.is_fully_sharded
    ),
    "--fp8-recipe delayed or tensorwise, which have one scale per weight: optimizer shards do "
    "not align with the blocks of other recipes "
    "| fp8_param_gather": lambda c: c.fp8 is None or c.fp8_recipe not in ("blockwise", "mxfp8"),
    "training on data sets; --perform-rl-step trains on rollouts | mock_data": lambda c: (
        not c.perform_rl_step
    ),
    "--rl-generation-lag above 0 | rl_partial_rollouts": lambda c: c.rl_generation_lag != 0,
    "training steps, which --skip-train omits | rehearse_memory": lambda c: not c.skip_train,
    "--error-injection-rate | error_injection_type": lambda c: c.error_injection_rate > 0,
    "pretrain_vlm.py (--model-kind vlm) | "
    f"{' '.join(n for n in _dests_of(VisionConfig) if n not in _SHARED)}": lambda c: (
        c.kind.reads_images
    ),
    "pretrain_vlm.py (--model-kind vlm) or pretrain_vision_classify.py (--model-kind vit) | "
    f"{' '.join(_SHARED)}": lambda c: c.kind.reads_images or c.kind.classifies_images,
    "pretrain_vision_classify.py (--model-kind vit) | "
    f"{' '.join(_dests_of(ImageClassifierConfig))}": lambda c: c.kind.classifies_images,
    # A rule refuses the switch itself for other models.
    f"pretrain_retro.py with --retro-add-retriever | {' '.join(_RETRO_FLAGS)}": lambda c: (
        c.kind.reads_neighbors and c.retro_add_retriever
    ),
    f"examples/mimo/train.py (--model-kind mimo) | {' '.join(_dests_of(MimoConfig))}": lambda c: (
        c.kind.has_placeholders
    ),
    "--vision-model-type qwen3_vl | vision_num_position_embeddings deepstack_visual_indexes": (
        lambda c: c.kind.reads_images and c.vision_model_type == "qwen3_vl"
    ),
    "--vision-model-type pixtral | image_row_end_tokens": lambda c: (
        c.kind.reads_images and c.vision_model_type == "pixtral"
    ),
    "--vision-model-type gemma3 | pooled_image_embeddings": lambda c: (
        c.kind.reads_images and c.vision_model_type == "gemma3"
    ),
    "an encoder that is trained (no --freeze-ViT) | recompute_vision": lambda c: not c.freeze_ViT,
    "--perform-rl-step or a script that generates text | "
    "inference_dynamic_batching_buffer_size_gb inference_logging_step_interval": lambda c: (
        c.perform_rl_step or not c.trains
    ),
    "--dsa-indexer-loss-coeff | dsa_indexer_use_sparse_loss": lambda c: c.dsa_indexer_loss_coeff,
    "--distributed-backend nccl | high_priority_stream_groups nccl_communicator_config_path "
    "nccl_ub": lambda c: c.distributed_backend in (None, "nccl"),
    "--context-parallel-size of 2 or more | cp_comm_type": lambda c: (
        c.context_parallel_size > 1 or c.hybrid_context_parallel
    ),
    "--context-parallel-size of 2 or more and --cp-comm-type a2a+p2p | "
    "hierarchical_context_parallel_sizes": lambda c: (
        c.context_parallel_size > 1 and "a2a+p2p" in c.cp_comm_types
    ),
    "--pipeline-model-parallel-size of 2 or more | overlap_p2p_comm "
    "overlap_p2p_comm_warmup_flush align_grad_reduce pipeline_schedule pipeline_split "
    "encoder_pipeline_model_parallel_size account_for_embedding_in_pipeline_split "
    "account_for_loss_in_pipeline_split "
    "defer_embedding_wgrad_compute": lambda c: c.pipeline_model_parallel_size > 1,
    "virtual stages of --pipeline-schedule "
    "interleaved | microbatch_group_size_per_vp_stage": lambda c: (
        c.virtual_pipeline_model_parallel_size is not None and c.pipeline_schedule != "zb-v"
    ),
    "--use-distributed-optimizer | overlap_param_gather "
    "overlap_param_gather_with_optimizer_step num_distributed_optimizer_instances": lambda c: (
        c.use_distributed_optimizer or c.is_fully_sharded
    ),
    "--use-megatron-fsdp with fully sharded parameters and "
    "--num-distributed-optimizer-instances "
    "2 or more | enable_full_sharding_in_hsdp outer_dp_sharding_strategy": lambda c: (
        shares_instances(c.config.ddp)
    ),
    "fully sharded parameters (--use-torch-fsdp2, or --use-megatron-fsdp with "
    "--data-parallel-sharding-strategy optim_grads or optim_grads_params) | "
    "gradient_reduce_div_fusion "
    "init_model_with_meta_device fsdp_double_buffer": lambda c: c.is_fully_sharded,
    "complete parameters on each data-parallel rank, which FSDP does not keep | "
    "check_weight_hash_across_dp_replicas_interval": lambda c: not c.is_fully_sharded,
    "gradient buckets; FSDP reduces gradients layer by layer in backward | overlap_param_gather "
    "overlap_param_gather_with_optimizer_step overlap_grad_reduce align_grad_reduce "
    "ddp_num_buckets ddp_bucket_size ddp_pad_buckets_for_high_nccl_busbw "
    "ddp_average_in_collective": lambda c: not c.is_fully_sharded,
    "an attention layer, * in --hybrid-override-pattern | apply_query_key_layer_scaling "
    "attention_dropout attn_logit_softcapping group_query_attention no_rope_freq "
    "num_query_groups qk_layernorm rotary_base rotary_percent softmax_type "
    "window_attn_skip_freq window_rotary_base window_size": lambda c: c.has_layer(ATTENTION),
    "an MLP layer, - or E in --hybrid-override-pattern "
    "| ffn_hidden_size squared_relu swiglu": lambda c: c.has_layer(MLP + EXPERTS),
    "layers chosen by ratios, which --hybrid-override-pattern replaces | hybrid_attention_ratio "
    "hybrid_mlp_ratio": lambda c: not c.kind.is_hybrid or c.hybrid_override_pattern is None,
}

REQUIREMENTS = (
    NEEDS_GPU,
    *(needs(words, dests) for words, dests in _FLAGS_NEEDED.items()),
    needs("--inprocess-restart", " ".join(f.name for f in RESTART_FLAGS)),
    needs("--perform-rl-step", " ".join((*RL_FLAGS, "moe_enable_routing_replay"))),
    *(
        needs(words, dests, is_met)
        for row, is_met in _NEEDS.items()
        for words, _, dests in [row.partition(" | ")]
    ),
)

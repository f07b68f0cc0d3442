"""Requirements of the flags of fine-tuning and distillation; see `flag_requirements`."""

from __future__ import annotations

from megatron.training.arguments.requirement import needs, needs_flag, needs_value
from megatron.training.config.preference import reads_conversations
from megatron.training.config.rl import RL_FLAGS

OF_FINE_TUNING = (
    needs(
        "--sft, --dpo-beta or --reward-model",
        "sft_packing sft_long_conversations sft_alignment sft_show_sample",
        reads_conversations,
    ),
    needs_flag("eval_generate", "eval_generate_tokens"),
    needs_flag("dpo_beta", "dpo_loss_type dpo_label_smoothing"),
    needs_value("tokenizer_type", "SFTTokenizer", "sft_tokenizer_prompt_format"),
    needs_flag(
        "lora_rank", "lora_alpha lora_base_dtype lora_dropout lora_target_modules lora_use_rslora"
    ),
    needs_flag(
        "logits_save_dir",
        "logits_save_top_k logits_save_top_p logits_save_top_p_min_k logits_save_dtype",
    ),
    needs_flag("logits_save_top_p", "logits_save_top_p_min_k"),
    needs_flag("logits_load_dir", "logits_load_kd_loss_alpha logits_load_ignore_errors"),
    needs_flag("perform_rl_step", " ".join(RL_FLAGS)),
    needs(
        "--perform-rl-step or a script that generates text",
        "inference_dynamic_batching_buffer_size_gb",
        lambda ns: ns.perform_rl_step or not ns.trains,
    ),
    needs_flag("rl_inference_logprobs_is_correction", "rl_importance_sampling_truncation_coef"),
)

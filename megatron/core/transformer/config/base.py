"""Depth, width, norms and initialisation of a transformer."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config.option import option


@dataclass(frozen=True, kw_only=True)
class BaseConfig:
    """Depth, width, norms and initialisation of a transformer."""

    num_layers: int = option(0, "", group="network size", default=None)
    hidden_size: int = option(0, "", group="network size", default=None)
    normalization: str = option(
        "LayerNorm",
        "",
        group="network size",
        choices=("LayerNorm", "RMSNorm"),
    )
    layernorm_epsilon: float = option(
        1e-05,
        "",
        group="network size",
        flag="--norm-epsilon",
        dest="norm_epsilon",
    )
    layernorm_zero_centered_gamma: bool = option(
        False,
        "",
        group="network size",
        flag="--apply-layernorm-1p",
        dest="apply_layernorm_1p",
    )
    apply_residual_connection_post_layernorm: bool = option(False, "", group="network size")
    layer_norm_placement: str = option(
        "pre",
        "Where a sublayer is normalised: its input (pre), its output (post) or both (sandwich).",
        group="network size",
        choices=("pre", "post", "sandwich"),
    )
    embedding_scale: float | None = option(
        None,
        "Factor on the word embeddings; 0 means the square root of the hidden size.",
        group="network size",
    )
    final_logit_softcapping: float | None = option(
        None,
        "Squash the output logits smoothly into plus or minus this value.",
        group="network size",
    )
    multi_latent_attention: bool = option(False, "", group="network size")
    mtp_num_layers: int | None = option(None, "", group="network size")
    mtp_loss_scaling_factor: float = option(0.1, "", group="network size")
    hidden_dropout: float = option(0.1, "", group="regularization")
    calculate_per_token_loss: bool = option(False, "", group="training")
    init_method_std: float = option(0.02, "", group="initialization")
    embedding_init_method_std: float = option(None, "", group="initialization")
    init_method_xavier_uniform: bool = option(False, "", group="initialization")
    fp32_residual_connection: bool = option(False, "", group="mixed precision")
    test_mode: bool = option(False, "", group="validation")
    heterogeneous_layers_config_path: str | None = option(
        None,
        "",
        group="heterogeneous architecture",
    )
    heterogeneous_layers_config_encoded_json: str | None = option(
        None,
        "",
        group="heterogeneous architecture",
    )
    symmetric_ar_type: str | None = option(
        None,
        "",
        group="inference",
        choices=("two_shot", "one_shot", "multimem_all_reduce", None),
    )
    nccl_all_reduce_for_prefill: bool = option(False, "", group="inference")
    mlp_chunks_for_prefill: int = option(1, "", group="inference")
    transformer_impl: str = option(
        "transformer_engine",
        "",
        group="Transformer-Engine",
        choices=("local", "transformer_engine"),
    )
    require_transformer_engine: bool = option(
        False,
        "Stop if Transformer Engine cannot be used, instead of running our own layers.",
        group="Transformer-Engine",
    )
    te_rng_tracker: bool = option(False, "", group="Transformer-Engine")
    inference_rng_tracker: bool = option(False, "", group="Transformer-Engine")
    mamba_state_dim: int = option(128, "", group="experimental")
    mamba_head_dim: int = option(64, "", group="experimental")
    mamba_num_groups: int = option(8, "", group="experimental")
    mamba_num_heads: int | None = option(None, "", group="experimental")
    is_hybrid_model: bool = option(False, "", group="experimental")
    use_mamba_mem_eff_path: bool = option(
        True,
        "",
        group="experimental",
        inverted=True,
        flag="--disable-mamba-mem-eff-path",
        dest="disable_mamba_mem_eff_path",
    )
    config_logger_dir: str = option("", "", group="config logger")

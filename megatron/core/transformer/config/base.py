"""Depth, width, norms, MLP and initialization of a transformer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from megatron.core.config import flag_messages
from megatron.core.config.option import MAX_LAYERS, option

_network = partial(option, group="network size")


@dataclass(kw_only=True)
class MLPConfig:
    """MLP options: width, activation and bias."""

    ffn_hidden_size: int = _network(
        None,
        "Hidden size of the MLP; 4 x hidden size if not given, with --swiglu 8/3 of it in "
        "multiples of 64.",
        at_least=1,
    )
    activation_func_clamp_value: float | None = _network(
        None, "Upper bound of a gated MLP's gate, and bound of the magnitude of its linear input."
    )
    glu_linear_offset: float = _network(
        0.0, "Offset added to the linear input of a gated MLP.", at_least=None
    )
    add_bias_linear: bool = option(
        True,
        "Disable the biases of linear layers.",
        group="training",
        flag="--disable-bias-linear",
    )


_initialization = partial(option, group="initialization")
_inference = partial(option, group="inference")
_te = partial(option, group="Transformer-Engine")
_experimental = partial(option, group="experimental")


@dataclass(kw_only=True)
class BaseConfig:
    """Depth, width, norms and initialization of a transformer."""

    num_layers: int = _network(
        0, "Number of transformer layers.", default=None, at_least=1, at_most=MAX_LAYERS
    )
    hidden_size: int = _network(
        0, "Hidden size: width of the residual stream.", default=None, at_least=1
    )
    normalization: str = _network(
        "LayerNorm", "Type of the normalization layers.", choices=("LayerNorm", "RMSNorm")
    )
    layernorm_epsilon: float = _network(
        1e-05,
        "Epsilon added to the variance in normalization layers.",
        flag="--norm-epsilon",
        dest="norm_epsilon",
    )
    layernorm_zero_centered_gamma: bool = _network(
        False,
        "Store normalization weights minus 1, so that weight decay pulls them towards 1.",
        flag="--apply-layernorm-1p",
        dest="apply_layernorm_1p",
    )
    apply_residual_connection_post_layernorm: bool = _network(
        False, "Take the residual connection after the input normalization instead of before it."
    )
    layer_norm_placement: str = _network(
        "pre",
        "Normalize the input of each sublayer (pre), its output (post) or both (sandwich), or the "
        "input in layers of linear attention and the output in the others (post_softmax).",
        choices=("pre", "post", "sandwich", "post_softmax"),
    )
    residual_scale: float | None = _network(
        None,
        "Multiplier of the output of each sublayer before it is added to the residual stream; "
        "1 if not given.",
    )
    enable_mhc_connections: bool = _network(
        False,
        "Replace the residual stream by several ones that each sublayer mixes, by "
        "manifold-constrained hyper-connections (mHC).",
    )
    mhc_num_residual_streams: int = _network(4, "Number of residual streams of mHC.", at_least=1)
    mhc_init_gating_factor: float = _network(
        0.01, "Initial factor of the part of mHC's weights that depends on the token."
    )
    mhc_sinkhorn_iterations: int = _network(
        20,
        "Sinkhorn-Knopp iterations that make mHC's matrices of residual streams doubly stochastic.",
        at_least=1,
    )
    embedding_scale: float | None = _network(
        None, "Multiplier of the word embeddings; 0 means sqrt(hidden size)."
    )
    output_scale: float | None = _network(
        None,
        "Multiplier of the output layer's input; 0 means 1/sqrt(hidden size).",
    )
    use_mup: bool = _network(
        False,
        "Maximal update parametrization (muP): scale initialization, learning rates, attention and "
        "logits by the width, so that a learning rate found at --mup-base-hidden-size stays best.",
    )
    mup_base_hidden_size: int | None = _network(
        None,
        "Hidden size at which --use-mup scales nothing by the width; --hidden-size if not given.",
        at_least=1,
    )
    mup_width_mult: float = _network(
        1.0,
        "Hidden size divided by --mup-base-hidden-size.",
        ignored="it is --hidden-size divided by --mup-base-hidden-size",
    )
    mup_base_head_dim: float | None = _network(
        None,
        "Head dimension d0 of the base model of --use-mup: attention scores are multiplied by "
        "d0^(p-0.5) / d^p, with p from --mup-attn-scale-power; by 1 / d^p if not given.",
    )
    mup_attn_scale_power: float = _network(
        1.0, "Power p of the head dimension d by which --use-mup divides attention scores."
    )
    mup_embedding_mult: float = _network(
        1.0, "Multiplier of the word embeddings with --use-mup, the same at all widths."
    )
    mup_output_mult: float = _network(
        1.0,
        "Multiplier of the logits with --use-mup, besides 1 / (hidden size / base hidden size).",
    )
    final_logit_softcapping: float | None = _network(
        None, "Soft-cap the output logits to plus or minus this value (tanh)."
    )
    multi_latent_attention: bool = _network(
        False,
        "Use multi-latent attention (MLA): keys and values are compressed to one latent "
        "vector per token.",
    )
    mtp_num_layers: int | None = _network(
        None,
        "Number of multi-token prediction (MTP) layers, each of which predicts one token "
        "further ahead.",
        at_most=MAX_LAYERS,
    )
    mtp_loss_scaling_factor: float = _network(None, "Weight of the mean MTP loss.", default=0.1)
    mtp_use_repeated_layer: bool = _network(
        False, "Use the weights of one MTP layer for all --mtp-num-layers."
    )
    mtp_detach_heads: bool = _network(
        False,
        "Train only the MTP layers with their losses: no gradient enters the decoder, the "
        "embedding and the output layer.",
    )
    mtp_hybrid_override_pattern: str | None = _network(
        None,
        "Letters of the layers of each MTP layer of a hybrid model, as in "
        "--hybrid-override-pattern; a pattern MAIN/MTP sets it too.",
    )
    hidden_dropout: float = option(
        0.1, "Dropout probability of the output of attention and MLP.", group="regularization"
    )
    calculate_per_token_loss: bool = option(
        False,
        "Average the loss over all tokens of the global batch instead of averaging "
        "micro-batch means.",
        group="training",
    )
    init_method_std: float = _initialization(
        0.02, "Standard deviation of the normal weight initialization."
    )
    embedding_init_method_std: float = _initialization(
        None,
        "Standard deviation of the word embedding initialization; --init-method-std if not given.",
    )
    init_method_xavier_uniform: bool = _initialization(
        False, "Use Xavier uniform weight initialization."
    )
    fp32_residual_connection: bool = option(
        False,
        "Keep hidden states between layers in fp32; needs --bf16 or --fp16.",
        group="mixed precision",
    )
    test_mode: bool = option(
        False,
        "Mark the run as a test run, as Megatron-LM's test scripts do.",
        group="validation",
        ignored="this program behaves the same in a test run",
    )
    heterogeneous_layers_config_path: str | None = option(
        None,
        "JSON file with the configuration of each layer, in the Llama-Nemotron format.",
        group="heterogeneous architecture",
    )
    heterogeneous_layers_config_encoded_json: str | None = option(
        None,
        "Content of --heterogeneous-layers-config-path.",
        group="heterogeneous architecture",
    )
    symmetric_ar_type: str | None = _inference(
        None,
        "All-reduce over symmetric memory during generation.",
        choices=("two_shot", "one_shot", "multimem_all_reduce", None),
        ignored="generation uses the all-reduce of NCCL",
    )
    nccl_all_reduce_for_prefill: bool = _inference(
        False,
        "Use NCCL for prompts where --symmetric-ar-type serves tokens.",
        ignored=flag_messages.only_with("--symmetric-ar-type"),
    )
    mlp_chunks_for_prefill: int = _inference(
        1,
        "Chunks in which the MLP processes a prompt, to save memory.",
        ignored="generation computes the MLP of a prompt in one chunk",
    )
    transformer_impl: str = _te(
        "transformer_engine",
        "Layer implementation: transformer_engine where it is installed, or local (this "
        "program's own, which is inference_optimized too).",
        choices=("local", "transformer_engine", "inference_optimized"),
    )
    require_transformer_engine: bool = _te(
        False, "Exit if Transformer Engine cannot be used, instead of using local layers."
    )
    te_rng_tracker: bool = _te(
        False,
        "Use Transformer Engine's random state tracker.",
        ignored="--enable-cuda-graph makes random state capturable without this flag",
    )
    inference_rng_tracker: bool = _te(
        False,
        "Use a random state tracker that supports CUDA graph capture of generation.",
        ignored="--enable-cuda-graph makes random state capturable without this flag",
    )
    mamba_state_dim: int = _experimental(128, "State dimension of Mamba layers.", at_least=1)
    mamba_head_dim: int = _experimental(64, "Head dimension of Mamba layers.", at_least=1)
    mamba_num_groups: int = _experimental(
        8,
        "Number of groups in a Mamba layer; the heads of a group share their B and C projections.",
        at_least=1,
    )
    mamba_num_heads: int | None = _experimental(
        None,
        "Number of heads of a Mamba layer; 2 x hidden size / head dimension if not given.",
        at_least=1,
    )
    is_hybrid_model: bool = _experimental(
        False,
        "Scale output-projection initialization by 1/sqrt(L) instead of 1/sqrt(2L), for "
        "hybrid models.",
    )
    use_mamba_mem_eff_path: bool = _experimental(
        True,
        "Do not use the memory-saving fused Mamba path.",
        inverted=True,
        flag="--disable-mamba-mem-eff-path",
        dest="disable_mamba_mem_eff_path",
        ignored=flag_messages.NO_KERNEL,
    )
    config_logger_dir: str = option(
        "",
        "Directory to which each rank writes its configuration objects as JSON at start-up.",
        group="config logger",
    )

    @property
    def num_mtp_modules(self) -> int:
        """Number of MTP depths that have weights of their own."""
        return min(self.mtp_num_layers or 0, 1 if self.mtp_use_repeated_layer else MAX_LAYERS)

    @property
    def num_layers_ahead(self) -> int:
        """Number of layers in all MTP depths, after the decoder's ``num_layers``."""
        return (self.mtp_num_layers or 0) * len(self.mtp_hybrid_override_pattern or "x")

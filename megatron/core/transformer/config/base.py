"""Depth, width, norms and initialisation of a transformer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from megatron.core.config import flag_messages
from megatron.core.config.option import MAX_LAYERS, option

_network = partial(option, group="network size")
_initialization = partial(option, group="initialization")
_inference = partial(option, group="inference")
_te = partial(option, group="Transformer-Engine")
_experimental = partial(option, group="experimental")


@dataclass(frozen=True, kw_only=True)
class BaseConfig:
    """Depth, width, norms and initialisation of a transformer."""

    num_layers: int = _network(
        0, "Transformer layers of the model.", default=None, at_least=1, at_most=MAX_LAYERS
    )
    hidden_size: int = _network(0, "Width of the residual stream.", default=None, at_least=1)
    normalization: str = _network(
        "LayerNorm", "Kind of the normalisation layers.", choices=("LayerNorm", "RMSNorm")
    )
    layernorm_epsilon: float = _network(
        1e-05,
        "Added to the variance inside the normalisation layers.",
        flag="--norm-epsilon",
        dest="norm_epsilon",
    )
    layernorm_zero_centered_gamma: bool = _network(
        False,
        "Store normalisation weights as their distance from 1, so that weight decay pulls "
        "towards 1.",
        flag="--apply-layernorm-1p",
        dest="apply_layernorm_1p",
    )
    apply_residual_connection_post_layernorm: bool = _network(
        False, "Branch the residual off behind the input normalisation instead of before it."
    )
    layer_norm_placement: str = _network(
        "pre",
        "Where a sublayer is normalised: its input (pre), its output (post) or both (sandwich).",
        choices=("pre", "post", "sandwich"),
    )
    embedding_scale: float | None = _network(
        None, "Factor on the word embeddings; 0 means the square root of the hidden size."
    )
    output_scale: float | None = _network(
        None,
        "Factor on what the output layer reads; 0 means one over the square root of the hidden "
        "size.",
    )
    final_logit_softcapping: float | None = _network(
        None, "Squash the output logits smoothly into plus or minus this value."
    )
    multi_latent_attention: bool = _network(
        False, "Compress keys and values into one small latent vector per token."
    )
    mtp_num_layers: int | None = _network(
        None,
        "Layers behind the decoder that predict tokens further ahead in training.",
        at_most=MAX_LAYERS,
    )
    mtp_loss_scaling_factor: float = _network(
        0.1, "Weight of the mean loss of the layers of --mtp-num-layers."
    )
    hidden_dropout: float = option(
        0.1, "Probability of dropping a channel of a sublayer's output.", group="regularization"
    )
    calculate_per_token_loss: bool = option(
        False,
        "Average the loss over all tokens of the global batch instead of micro-batch by "
        "micro-batch.",
        group="training",
    )
    init_method_std: float = _initialization(0.02, "Standard deviation of initial weights.")
    embedding_init_method_std: float = _initialization(
        None, "Standard deviation of initial word embeddings; that of the weights if not given."
    )
    init_method_xavier_uniform: bool = _initialization(
        False, "Draw initial weights uniformly by Xavier's rule."
    )
    fp32_residual_connection: bool = option(
        False, "Keep the residual stream in fp32.", group="mixed precision"
    )
    test_mode: bool = option(
        False,
        "Mark a run as a test of the reference.",
        group="validation",
        ignored="nothing behaves otherwise in a test",
    )
    heterogeneous_layers_config_path: str | None = option(
        None,
        "JSON file with the shape of each layer, in the Llama-Nemotron form.",
        group="heterogeneous architecture",
    )
    heterogeneous_layers_config_encoded_json: str | None = option(
        None,
        "The text of --heterogeneous-layers-config-path itself.",
        group="heterogeneous architecture",
    )
    symmetric_ar_type: str | None = _inference(
        None,
        "All-reduce over symmetric memory while generating.",
        choices=("two_shot", "one_shot", "multimem_all_reduce", None),
        refused="all-reduce over symmetric memory is not available in this program; use NCCL's, "
        "which runs without the flag",
    )
    nccl_all_reduce_for_prefill: bool = _inference(
        False,
        "Use NCCL for prompts where --symmetric-ar-type serves tokens.",
        ignored=flag_messages.only_with("--symmetric-ar-type"),
    )
    mlp_chunks_for_prefill: int = _inference(
        1,
        "Parts that a prompt's MLP is computed in, to save memory.",
        ignored="generation computes the MLP in one part",
    )
    transformer_impl: str = _te(
        "transformer_engine",
        "Layers of Transformer Engine where it is installed, or our own (local).",
        choices=("local", "transformer_engine"),
    )
    require_transformer_engine: bool = _te(
        False, "Stop if Transformer Engine cannot be used, instead of running our own layers."
    )
    te_rng_tracker: bool = _te(
        False,
        "Keep random state the way Transformer Engine does.",
        ignored="--enable-cuda-graph keeps it so by itself",
    )
    inference_rng_tracker: bool = _te(
        False,
        "Keep random state the way generation under CUDA graphs needs.",
        ignored="--enable-cuda-graph keeps it so by itself",
    )
    mamba_state_dim: int = _experimental(128, "Width of the state of a Mamba layer.", at_least=1)
    mamba_head_dim: int = _experimental(64, "Width of a head of a Mamba layer.", at_least=1)
    mamba_num_groups: int = _experimental(
        8, "Groups of a Mamba layer that share state projections.", at_least=1
    )
    mamba_num_heads: int | None = _experimental(
        None,
        "Heads of a Mamba layer (default: twice the hidden size over their width).",
        at_least=1,
    )
    is_hybrid_model: bool = _experimental(
        False,
        "Start the matrices that write into the residual stream for one part a layer, not two.",
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
        "Folder into which each rank writes every configuration object as JSON at start.",
        group="config logger",
    )

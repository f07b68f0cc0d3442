"""Check types and ranges of the values of a config.json before anything is computed from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from megatron.core.config.errors import CheckpointError

_MANY_LAYERS = 10_000  # layers, experts or heads: no model has more
_WIDEST = 2**31 - 1
Test = Callable[[object], bool]


def _is_between(least: int, most: int) -> Test:
    def test(value: object) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most

    return test


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e30


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and _is_number(value) and value > 0


# Pairs of a description, for the error message, and a test.  A null counts as absent.
_COUNT = ("an integer above 0 and below 2**31", _is_between(1, _WIDEST))
_FEW = ("an integer from 1 to 10000", _is_between(1, _MANY_LAYERS))
_FEW_OR_NONE = ("an integer from 0 to 10000", _is_between(0, _MANY_LAYERS))
_COUNT_OR_NONE = ("an integer from 0 to 2**31", _is_between(0, _WIDEST))
_NUMBER = ("a finite number", _is_number)
_POSITIVE = ("a number above 0", _is_positive)
_SWITCH = ("true or false", lambda value: isinstance(value, bool))
_NAME = ("text", lambda value: isinstance(value, str))
_LIST = ("a list", lambda value: isinstance(value, list) and len(value) <= _WIDEST)
_OBJECT = ("an object", lambda value: isinstance(value, dict))
_KINDS: Mapping[tuple[str, Test], str] = {
    _COUNT: "hidden_size intermediate_size max_position_embeddings vocab_size head_dim d_kv "
    "d_model d_ff n_embd n_positions n_inner moe_intermediate_size kv_lora_rank q_lora_rank "
    "qk_nope_head_dim qk_rope_head_dim v_head_dim shared_expert_intermediate_size "
    "moe_shared_expert_intermediate_size state_size ssm_state_size mamba_head_dim "
    "relative_attention_num_buckets relative_attention_max_distance "
    "original_max_position_embeddings",
    _FEW: "num_hidden_layers num_attention_heads num_key_value_heads num_layers num_decoder_layers "
    "n_layer n_head num_heads num_experts_per_tok n_groups mamba_num_heads conv_kernel "
    "decoder_sparse_step type_vocab_size",
    _FEW_OR_NONE: "num_experts num_local_experts n_routed_experts n_shared_experts n_group "
    "topk_group first_k_dense_replace num_nextn_predict_layers",
    _COUNT_OR_NONE: "sliding_window max_window_layers sliding_window_pattern",
    _POSITIVE: "rms_norm_eps layer_norm_epsilon layer_norm_eps rope_theta partial_rotary_factor "
    "query_pre_attn_scalar expand factor beta_fast beta_slow rope_local_base_freq",
    _NUMBER: "attention_dropout attn_pdrop embd_pdrop resid_pdrop dropout_rate hidden_dropout "
    "hidden_dropout_prob attention_probs_dropout_prob attn_logit_softcapping "
    "final_logit_softcapping routed_scaling_factor swiglu_limit mscale mscale_all_dim",
    _SWITCH: "tie_word_embeddings attention_bias mlp_bias norm_topk_prob use_sliding_window "
    "use_bidirectional_attention scale_decoder_outputs truncate",
    _NAME: "model_type hidden_act hidden_activation activation_function mlp_hidden_act "
    "feed_forward_proj topk_method scoring_func hybrid_override_pattern rope_type type",
    _LIST: "layer_types layers_block_type mlp_only_layers short_factor long_factor",
    _OBJECT: "rope_scaling rope_parameters quantization_config text_config vision_config "
    "full_attention sliding_attention",
}
_EXPECTED = {name: kind for kind, names in _KINDS.items() for name in names.split()}


def check_values(config: Mapping[str, object], path: Path) -> None:
    """Raise CheckpointError if a known entry of ``config`` has a wrong type or is out of range.

    ``path`` is the file that the error message names.  Unknown entries and nulls are not checked;
    the entries of nested objects are.
    """
    for name, value in config.items():
        if value is None or name not in _EXPECTED:
            continue
        what, is_so = _EXPECTED[name]
        if not is_so(value):
            shown = repr(value)
            shown = shown if len(shown) < 60 else f"{shown[:60]}..."
            raise CheckpointError(f"{path} has {name} {shown}: {what} is needed")
        if isinstance(value, dict):
            check_values(value, path)

"""Keys of a --yaml-cfg file that are config fields of Megatron-LM, not flags.

Megatron-LM's YAML files set fields of ``TransformerConfig`` and ``ModelParallelConfig`` directly.
A field that a flag sets under another name is translated to that flag.  Any other field must have
its default; otherwise it is refused, or ignored with a warning.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class ConfigField:
    """A config field that no flag sets.  Exactly one of ``refused`` and ``ignored`` is given."""

    default: object = None  # the value that requests nothing, like null
    refused: str | None = None
    ignored: str | None = None


@dataclass(frozen=True)
class Translation:
    """Values by dest, and messages about keys that cannot be translated."""

    values: dict[str, object]
    problems: list[str]
    warnings: list[str]


# field -> dest
RENAMED = {
    "virtual_pipeline_model_parallel_size": "num_virtual_stages_per_pipeline_rank",
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
    "original_max_position_embeddings": "yarn_original_max_position_embeddings",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
    "use_te_rng_tracker": "te_rng_tracker",
}

# (activation_func, gated_linear_unit) -> dest of its switch; None for the default
ACTIVATIONS: dict[tuple[str, bool], str | None] = {
    ("gelu", False): None,
    ("gelu", True): "geglu",
    ("geglu", True): "geglu",
    ("silu", True): "swiglu",
    ("swiglu", True): "swiglu",
    ("quick_gelu", True): "quick_geglu",
    ("quick_geglu", True): "quick_geglu",
    ("relu", False): "relu",
    ("squared_relu", False): "squared_relu",
    ("openai_gelu", False): "openai_gelu",
}
_SWITCHES = {dest for dest in ACTIVATIONS.values() if dest is not None}
_ALWAYS_GATED = {"swiglu", "geglu", "quick_geglu"}
_BIAS_FUSIONS = ("bias_gelu_fusion", "bias_swiglu_fusion")

_PROGRAM = ConfigField(
    refused="the program builds this object itself; use the keys of its settings"
)
_DTYPE = ConfigField(refused="the dtype follows bf16 and fp16; use one of those keys")
_TP_OVERLAP = ConfigField(False, ignored="it only adjusts tp_comm_overlap")
_EXACT_FP8 = ConfigField(
    False, refused="this fp8 path is not available in this program; use fp8 and fp8_recipe"
)
_IMPLEMENTATION = "this version makes this choice itself; results do not depend on it"
_DERIVED = ConfigField(False, ignored="the program derives it from other keys")

FIELDS: dict[str, ConfigField] = {
    **dict.fromkeys(
        "timers finalize_model_grads_func grad_scale_func no_sync_func grad_sync_func "
        "param_sync_func".split(),
        _PROGRAM,
    ),
    "params_dtype": _DTYPE,
    "pipeline_dtype": _DTYPE,
    "enable_autocast": ConfigField(False, refused="use bf16 or fp16 instead of autocast"),
    "autocast_dtype": ConfigField(ignored="it only adjusts enable_autocast"),
    "num_microbatches_with_partial_activation_checkpoints": ConfigField(
        refused="recomputing only some micro-batches is not available; use recompute_granularity"
    ),
    **dict.fromkeys(
        "tp_comm_atomic_ag tp_comm_atomic_rs tp_comm_overlap_disable_qkv "
        "tp_comm_overlap_disable_fc1".split(),
        _TP_OVERLAP,
    ),
    "batch_p2p_comm": ConfigField(True, ignored=_IMPLEMENTATION),
    "batch_p2p_sync": ConfigField(True, ignored=_IMPLEMENTATION),
    "deallocate_pipeline_outputs": ConfigField(False, ignored=_IMPLEMENTATION),
    "variable_seq_lengths": ConfigField(
        False,
        ignored="rows of --no-sft-packing differ in length without it, others have one length",
    ),
    "cpu_offloading_activations": ConfigField(
        True, ignored="cpu_offloading always offloads activations"
    ),
    "cpu_offloading_weights": ConfigField(False, ignored="cpu_offloading does not offload weights"),
    "cpu_offloading_double_buffering": ConfigField(False, ignored=_IMPLEMENTATION),
    "moe_extended_tp": ConfigField(False, refused="use expert_tensor_parallel_size"),
    "moe_token_dropping": ConfigField(
        False, refused="use moe_expert_capacity_factor to drop tokens"
    ),
    "moe_router_topk_limited_devices": ConfigField(
        refused="use moe_router_num_groups and moe_router_group_topk"
    ),
    "output_layer_init_method": ConfigField(refused="use init_method_std instead"),
    "embedding_init_method": ConfigField(refused="use embedding_init_method_std"),
    "memory_efficient_layer_norm": ConfigField(False, ignored=_IMPLEMENTATION),
    "disable_parameter_transpose_cache": ConfigField(False, ignored=_IMPLEMENTATION),
    "activation_func_fp8_input_store": _EXACT_FP8,
    "fp8_dot_product_attention": _EXACT_FP8,
    "fp8_multi_head_attention": _EXACT_FP8,
    "tp_only_amax_red": _EXACT_FP8,
    "use_kitchen": ConfigField(False, refused="the kitchen package is not public; use fp8"),
    "quant_recipe": ConfigField(refused="the kitchen package is not public; use fp8"),
    "cuda_graph_use_single_mempool": ConfigField(False, ignored=_IMPLEMENTATION),
    "cuda_graph_retain_backward_graph": ConfigField(False, ignored=_IMPLEMENTATION),
    "heterogeneous_block_specs": ConfigField(False, refused="use heterogeneous_layers_config_path"),
    "hetereogenous_dist_checkpoint": _DERIVED,
    "is_hybrid_model": _DERIVED,
    "standalone_embedding_stage": ConfigField(
        False, refused="use account_for_embedding_in_pipeline_split"
    ),
}

# Keys that a function below translates.
_TRANSLATED = ("activation_func", "gated_linear_unit", "bias_activation_fusion", "init_method")
NAMES = (*FIELDS, *RENAMED, *_TRANSLATED)


def translate(content: dict[str, object]) -> Translation:
    """Replace config fields in ``content`` (key -> value) by the dests of flags."""
    values = {RENAMED.get(key, key): value for key, value in content.items() if key not in FIELDS}
    given = {key: values.pop(key) for key in _TRANSLATED if key in values}
    warnings: list[str] = []
    problems = [*_activation(given, values), *_initialization(given, values)]
    if given.get("bias_activation_fusion") is False:  # of all activations
        values = dict.fromkeys(_BIAS_FUSIONS, False) | values
    for key, value in content.items():
        field = FIELDS.get(key)
        if field is None or value is None or value == field.default:
            continue
        if field.refused is not None:
            problems.append(_unavailable(key, value, field.refused))
        elif isinstance(field.default, bool) and not isinstance(value, bool):
            problems.append(f"{key}: {value!r} is not true or false")
        else:
            warnings.append(f"{key} {value} is without effect: {field.ignored}")
    return Translation(values, problems, warnings)


def _unavailable(key: str, value: object, fix: str) -> str:
    return f"{key}: {value!r} is not available: {fix}"


def _activation(given: dict[str, object], values: dict[str, object]) -> Iterator[str]:
    """Set the flag for ``activation_func`` and ``gated_linear_unit``; yield errors."""
    name, is_gated = given.get("activation_func"), bool(given.get("gated_linear_unit"))
    on = sorted(dest for dest in _SWITCHES if values.get(dest) is True)
    if name is None and (not is_gated or on):
        return
    name = "gelu" if name is None else str(name)
    if name not in {known for known, _ in ACTIVATIONS}:
        names = ", ".join(dict.fromkeys(known for known, _ in ACTIVATIONS))
        yield f"activation_func {name}: use one of {names}"
        return
    wanted = (name, is_gated or name in _ALWAYS_GATED)
    if wanted not in ACTIVATIONS:
        yield (
            f"activation_func {name} with gated_linear_unit {str(is_gated).lower()} is not "
            "available: change one of them"
        )
        return
    switch = ACTIVATIONS[wanted]
    if on and on != [switch]:
        yield f"activation_func {name} and {', '.join(on)} contradict each other: keep one"
    elif switch is not None:
        values[switch] = True


def _initialization(given: dict[str, object], values: dict[str, object]) -> Iterator[str]:
    method = given.get("init_method")
    if method == "xavier_uniform":
        values["init_method_xavier_uniform"] = True
    elif method is not None:
        yield _unavailable("init_method", method, "use xavier_uniform, or init_method_std")

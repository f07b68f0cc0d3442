"""Keys of a --yaml-cfg file that are config fields of Megatron-LM, not flags.

Megatron-LM's YAML files set fields of ``TransformerConfig`` and ``ModelParallelConfig`` directly.
A field that a flag sets under another name is translated to that flag.  Any other field must have
its default; otherwise it is refused, or ignored with a warning.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron.core.config.option import library_fields_of
from megatron.core.config.parse import parse_table
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.arguments.sections import flags_and_defaults

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

# Keys, each with the value that requests nothing if that is not null, and why others are refused.
_REFUSED = """
timers finalize_model_grads_func grad_scale_func no_sync_func grad_sync_func param_sync_func |
    the program builds this object itself; use the keys of its settings
params_dtype pipeline_dtype | the dtype follows bf16 and fp16; use one of those keys
num_microbatches_with_partial_activation_checkpoints |
    recomputing only some micro-batches is not available; use recompute_granularity
moe_token_dropping=False | use moe_expert_capacity_factor to drop tokens
output_layer_init_method | use init_method_std instead
embedding_init_method | use embedding_init_method_std
heterogeneous_block_specs=False | use heterogeneous_layers_config_path
moe_router_topk_limited_devices | use moe_router_num_groups and moe_router_group_topk
standalone_embedding_stage=False | use account_for_embedding_in_pipeline_split
"""
# The same for keys that are ignored with a warning.
_IGNORED = """
variable_seq_lengths=False |
    rows of --no-sft-packing differ in length without it, others have one length
cpu_offloading_activations=True | cpu_offloading always offloads activations
cpu_offloading_weights=False | cpu_offloading does not offload weights
is_hybrid_model=False | the program derives it from other keys
"""


def _fields(text: str) -> dict[str, tuple[bool | None, str]]:
    """Return the keys of a table: the value that requests nothing, like null, and the reason."""
    return {
        key: ({"": None}.get(default, default == "True"), reason)
        for keys, reason in parse_table(text).items()
        for key, _, default in (word.partition("=") for word in keys.split())
    }


def _of_library(*, refused: bool) -> dict[str, tuple[Any, str]]:
    """Return the keys that are fields without effect of the model's config, and not flags."""
    flags = RENAMED.keys() | flags_and_defaults().keys()
    return {
        f.name: (f.default, entry.reason)
        for f, entry in library_fields_of(TransformerConfig)
        if entry.is_refused == refused and f.name not in flags and f.name[0] != "_"
    }


REFUSED = _of_library(refused=True) | _fields(_REFUSED)
IGNORED = {
    key: entry
    for key, entry in (_of_library(refused=False) | _fields(_IGNORED)).items()
    if key not in REFUSED
}

# Keys that a function below translates.
_TRANSLATED = ("activation_func", "gated_linear_unit", "bias_activation_fusion", "init_method")
NAMES = (*REFUSED, *IGNORED, *RENAMED, *_TRANSLATED)


def translate(content: dict[str, object]) -> tuple[dict[str, object], list[str], list[str]]:
    """Replace config fields in ``content`` (key -> value) by the dests of flags.

    Returns values by dest, and the error messages and warnings about keys without a flag.
    """
    fields = REFUSED | IGNORED
    values = {RENAMED.get(key, key): value for key, value in content.items() if key not in fields}
    given = {key: values.pop(key) for key in _TRANSLATED if key in values}
    warnings: list[str] = []
    problems = [*_activation(given, values), *_initialization(given, values)]
    if given.get("bias_activation_fusion") is False:  # of all activations
        values = dict.fromkeys(_BIAS_FUSIONS, False) | values
    for key, value in content.items():
        default, reason = fields.get(key, (None, ""))
        if key not in fields or value is None or value == default:
            continue
        if key in REFUSED:
            problems.append(_unavailable(key, value, reason))
        elif isinstance(default, bool) and not isinstance(value, bool):
            problems.append(f"{key}: {value!r} is not true or false")
        else:
            warnings.append(f"{key} {value} is without effect: {reason}")
    return values, problems, warnings


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

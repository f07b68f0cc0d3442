"""Flags that set several fields, and flags that only old scripts use."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from megatron.core.config import flag_messages
from megatron.core.config.option import option

_network = partial(option, group="network size")
_training = partial(option, group="training")
_old_ckpt = partial(option, group="checkpointing", ignored=flag_messages.OLD_SPELLING)
_precision = partial(option, group="mixed precision")
_moe = partial(option, group="moe")
_device = partial(option, group="device and checks")


@dataclass(frozen=True, kw_only=True)
class ShorthandFlags:
    group_query_attention: bool = _network(
        False, "Let several query heads share a key and value head, as --num-query-groups says."
    )
    use_rotary_position_embeddings: bool = _network(
        False, "Old spelling of --position-embedding-type rope."
    )
    add_position_embedding: bool = _network(
        True,
        "Old spelling that drops the table of learned positions; use --position-embedding-type.",
        flag="--no-position-embedding",
        ignored="--position-embedding-type says which positions there are",
    )
    openai_gelu: bool = _network(False, "GELU in its tanh approximation.")
    relu: bool = _network(False, "ReLU as activation of the MLP.")
    squared_relu: bool = _network(False, "Squared ReLU as activation of the MLP.")
    geglu: bool = _network(
        False, "Gated GELU MLP; with --openai-gelu in its tanh form. The MLP width is not adapted."
    )
    quick_geglu: bool = _network(
        False, "Gated MLP with x sigmoid(1.702 x) as activation. The MLP width is not adapted."
    )
    swiglu: bool = _network(False, "Gated SiLU MLP: two matrices in, one out.")
    batch_size: int | None = _training(
        None, "Removed; say --micro-batch-size.", refused="it was renamed; use --micro-batch-size"
    )
    recompute_activations: bool = _training(
        False, "Old spelling of --recompute-granularity selective."
    )
    checkpoint_activations: bool = _training(
        False,
        "Removed; say --recompute-granularity full.",
        refused="it was removed; use --recompute-granularity full --recompute-method uniform, or "
        "--recompute-activations",
    )
    deprecated_use_mcore_models: bool = _training(
        False,
        "Old switch to the models that are now the only ones.",
        flag="--use-mcore-models",
        ignored=flag_messages.OLD_SPELLING,
    )
    warmup: int | None = option(
        None,
        "Removed; say --lr-warmup-fraction.",
        group="learning rate",
        refused="it was removed; use --lr-warmup-fraction",
    )
    use_dist_ckpt_deprecated: bool = _old_ckpt(
        False, "Old switch to a format that every rank writes part of.", flag="--use-dist-ckpt"
    )
    dist_ckpt_format_deprecated: str | None = _old_ckpt(
        None, "Old spelling of --ckpt-format.", flag="--dist-ckpt-format"
    )
    ckpt_fully_parallel_save_deprecated: bool = _old_ckpt(
        False, "Old switch that divides writing over replicas.", flag="--ckpt-fully-parallel-save"
    )
    fp16: bool = _precision(False, "Train in float16 with loss scaling; main weights stay fp32.")
    bf16: bool = _precision(False, "Train in bfloat16; main weights stay fp32.")
    model_parallel_size: int | None = option(
        None,
        "Removed; say --tensor-model-parallel-size.",
        group="distributed",
        refused="it was renamed; use --tensor-model-parallel-size",
    )
    moe_layer_recompute: bool = _moe(False, "Old spelling of --recompute-modules moe.")
    moe_extended_tp: bool = _moe(
        False, "Old spelling of --expert-tensor-parallel-size.", ignored=flag_messages.OLD_SPELLING
    )
    yaml_cfg: str | None = option(
        None,
        "File of flags (dest: value, YAML or JSON); the command line goes before it.",
        group="experimental",
    )
    check_only: bool = _device(
        False,
        "Parse, check and print layout, memory, communication and bubble for --check-world-size "
        "ranks, then end: status 0 if the run could start, 1 if it could not or does not fit "
        "--check-device-memory-gib. Needs no GPU.",
    )
    check_world_size: int | None = _device(
        None,
        "Ranks that --check-only plans for; WORLD_SIZE of the environment, or 1, if not given.",
    )
    check_rank: int = _device(0, "Rank whose pipeline --check-only plans.")
    check_device_memory_gib: float | None = _device(
        None,
        "Memory of a device: --check-only refuses a run that does not fit and names the cheapest "
        "change.",
    )

"""Flags that set several fields, and flags that only old scripts use."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config import states
from megatron.core.config.option import option


@dataclass(frozen=True, kw_only=True)
class ShorthandFlags:
    """Flags that set several fields, and flags that only old scripts use."""

    group_query_attention: bool = option(
        False,
        "Let several query heads share a key and value head, as --num-query-groups says.",
        group="network size",
    )
    use_rotary_position_embeddings: bool = option(
        False,
        "Old spelling of --position-embedding-type rope.",
        group="network size",
    )
    add_position_embedding: bool = option(
        True,
        "Old spelling that drops the table of learned positions; use --position-embedding-type.",
        group="network size",
        flag="--no-position-embedding",
        ignored="--position-embedding-type says which positions there are",
    )
    openai_gelu: bool = option(
        False,
        "GELU in its tanh approximation.",
        group="network size",
    )
    relu: bool = option(
        False,
        "ReLU as activation of the MLP.",
        group="network size",
    )
    squared_relu: bool = option(
        False,
        "Squared ReLU as activation of the MLP.",
        group="network size",
    )
    geglu: bool = option(
        False,
        "Gated GELU MLP; with --openai-gelu in its tanh form. The MLP width is not adapted.",
        group="network size",
    )
    quick_geglu: bool = option(
        False,
        "Gated MLP with x sigmoid(1.702 x) as activation. The MLP width is not adapted.",
        group="network size",
    )
    swiglu: bool = option(
        False,
        "Gated SiLU MLP: two matrices in, one out.",
        group="network size",
    )
    batch_size: int | None = option(
        None,
        "Removed; say --micro-batch-size.",
        group="training",
        refused="it was renamed; use --micro-batch-size",
    )
    recompute_activations: bool = option(
        False,
        "Old spelling of --recompute-granularity selective.",
        group="training",
    )
    checkpoint_activations: bool = option(
        False,
        "Removed; say --recompute-granularity full.",
        group="training",
        refused="it was removed; use --recompute-granularity full --recompute-method uniform, or "
        "--recompute-activations",
    )
    deprecated_use_mcore_models: bool = option(
        False,
        "Old switch to the models that are now the only ones.",
        group="training",
        flag="--use-mcore-models",
        ignored=states.OLD_SPELLING,
    )
    warmup: int | None = option(
        None,
        "Removed; say --lr-warmup-fraction.",
        group="learning rate",
        refused="it was removed; use --lr-warmup-fraction",
    )
    use_dist_ckpt_deprecated: bool = option(
        False,
        "Old switch to a format that every rank writes part of.",
        group="checkpointing",
        flag="--use-dist-ckpt",
        ignored=states.OLD_SPELLING,
    )
    dist_ckpt_format_deprecated: str | None = option(
        None,
        "Old spelling of --ckpt-format.",
        group="checkpointing",
        flag="--dist-ckpt-format",
        ignored=states.OLD_SPELLING,
    )
    ckpt_fully_parallel_save_deprecated: bool = option(
        False,
        "Old switch that divides writing over replicas.",
        group="checkpointing",
        flag="--ckpt-fully-parallel-save",
        ignored=states.OLD_SPELLING,
    )
    fp16: bool = option(
        False,
        "Train in float16 with loss scaling; main weights stay fp32.",
        group="mixed precision",
    )
    bf16: bool = option(
        False,
        "Train in bfloat16; main weights stay fp32.",
        group="mixed precision",
    )
    model_parallel_size: int | None = option(
        None,
        "Removed; say --tensor-model-parallel-size.",
        group="distributed",
        refused="it was renamed; use --tensor-model-parallel-size",
    )
    moe_layer_recompute: bool = option(
        False,
        "Old spelling of --recompute-modules moe.",
        group="moe",
    )
    moe_extended_tp: bool = option(
        False,
        "Old spelling of --expert-tensor-parallel-size.",
        group="moe",
        ignored=states.OLD_SPELLING,
    )
    yaml_cfg: str | None = option(
        None,
        "File of flags (dest: value, YAML or JSON); the command line goes before it.",
        group="experimental",
    )
    check_only: bool = option(
        False,
        "Parse, check and print layout, memory, communication and bubble for --check-world-size "
        "ranks, then end: status 0 if the run could start, 1 if not. Needs no GPU.",
        group="device and checks",
    )
    check_world_size: int | None = option(
        None,
        "Ranks that --check-only plans for; WORLD_SIZE of the environment, or 1, if not given.",
        group="device and checks",
    )
    check_rank: int = option(
        0,
        "Rank whose pipeline --check-only plans.",
        group="device and checks",
    )
    check_device_memory_gib: float | None = option(
        None,
        "Memory of a device: --check-only refuses a run that does not fit and names the cheapest "
        "change.",
        group="device and checks",
    )

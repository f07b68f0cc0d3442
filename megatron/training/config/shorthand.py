"""Flags that set several fields at once, and flags that only old scripts use."""

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
        False,
        "Use grouped-query attention with --num-query-groups key/value heads; excludes "
        "--multi-latent-attention.",
    )
    use_rotary_position_embeddings: bool = _network(
        False, "Alias of --position-embedding-type rope."
    )
    add_position_embedding: bool = _network(
        True,
        "Do not add learned positions; deprecated, use --position-embedding-type.",
        flag="--no-position-embedding",
        ignored="--position-embedding-type sets the position embedding",
    )
    openai_gelu: bool = _network(False, "Use the tanh approximation of GELU.")
    relu: bool = _network(False, "Use ReLU in the MLP.")
    squared_relu: bool = _network(False, "Use squared ReLU in the MLP.")
    geglu: bool = _network(
        False,
        "Use a gated GELU in the MLP, with --openai-gelu its tanh approximation; the default "
        "of --ffn-hidden-size does not change.",
    )
    quick_geglu: bool = _network(
        False,
        "Use x * sigmoid(1.702 x) as gate in the MLP; the default of --ffn-hidden-size does "
        "not change.",
    )
    swiglu: bool = _network(
        False,
        "Use a gated SiLU (SwiGLU) in the MLP; the default of --ffn-hidden-size becomes 8/3 "
        "of --hidden-size.",
    )
    batch_size: int | None = _training(
        None, "Removed; use --micro-batch-size.", refused="it was renamed; use --micro-batch-size"
    )
    recompute_activations: bool = _training(False, "Alias of --recompute-granularity selective.")
    checkpoint_activations: bool = _training(
        False,
        "Removed; use --recompute-granularity full.",
        refused="it was removed; use --recompute-granularity full --recompute-method uniform, or "
        "--recompute-activations",
    )
    deprecated_use_mcore_models: bool = _training(
        False,
        "Deprecated; the models of Megatron-LM's core library are the only ones.",
        flag="--use-mcore-models",
        ignored=flag_messages.OLD_SPELLING,
    )
    warmup: int | None = option(
        None,
        "Removed; use --lr-warmup-fraction.",
        group="learning rate",
        refused="it was removed; use --lr-warmup-fraction",
    )
    use_dist_ckpt_deprecated: bool = _old_ckpt(
        False, "Deprecated; use --ckpt-format instead of this switch.", flag="--use-dist-ckpt"
    )
    dist_ckpt_format_deprecated: str | None = _old_ckpt(
        None, "Deprecated; use --ckpt-format.", flag="--dist-ckpt-format"
    )
    ckpt_fully_parallel_save_deprecated: bool = _old_ckpt(
        False,
        "Deprecated; saving is distributed over data-parallel ranks by default.",
        flag="--ckpt-fully-parallel-save",
    )
    fp16: bool = _precision(
        False, "Train in fp16 with loss scaling and fp32 main parameters; excludes --bf16."
    )
    bf16: bool = _precision(False, "Train in bf16 with fp32 main parameters; excludes --fp16.")
    model_parallel_size: int | None = option(
        None,
        "Removed; use --tensor-model-parallel-size.",
        group="distributed",
        refused="it was renamed; use --tensor-model-parallel-size",
    )
    moe_layer_recompute: bool = _moe(
        False, "Alias of --recompute-granularity selective --recompute-modules moe."
    )
    moe_extended_tp: bool = _moe(
        False, "Old spelling of --expert-tensor-parallel-size.", ignored=flag_messages.OLD_SPELLING
    )
    yaml_cfg: str | None = option(
        None,
        "YAML or JSON file of flag values (dest: value); the command line takes precedence.",
        group="experimental",
    )
    check_only: bool = _device(
        False,
        "Validate the flags, print layout, memory, communication and pipeline bubble for "
        "--check-world-size ranks, and exit: status 0 if the run could start, 1 if it could "
        "not or does not fit --check-device-memory-gib. Needs no GPU.",
    )
    check_world_size: int | None = _device(
        None,
        "World size for --check-only; the environment variable WORLD_SIZE, or 1, if not given.",
    )
    check_rank: int = _device(0, "Rank whose pipeline --check-only plans.")
    check_device_memory_gib: float | None = _device(
        None,
        "Device memory in GiB: --check-only refuses a run that needs more and suggests the "
        "cheapest change.",
    )

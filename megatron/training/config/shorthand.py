"""Flags that set several fields, and flags that only old scripts use."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config.option import option


@dataclass(frozen=True, kw_only=True)
class ShorthandFlags:
    """Flags that set several fields, and flags that only old scripts use."""

    group_query_attention: bool = option(False, "", group="network size")
    use_rotary_position_embeddings: bool = option(False, "", group="network size")
    add_position_embedding: bool = option(
        True,
        "",
        group="network size",
        flag="--no-position-embedding",
    )
    openai_gelu: bool = option(False, "", group="network size")
    squared_relu: bool = option(False, "", group="network size")
    geglu: bool = option(
        False,
        "Gated GELU MLP; with --openai-gelu in its tanh form. The MLP width is not adapted.",
        group="network size",
    )
    swiglu: bool = option(False, "", group="network size")
    batch_size: int | None = option(None, "", group="training")
    recompute_activations: bool = option(False, "", group="training")
    checkpoint_activations: bool = option(False, "", group="training")
    deprecated_use_mcore_models: bool = option(
        False,
        "",
        group="training",
        flag="--use-mcore-models",
    )
    warmup: int | None = option(None, "", group="learning rate")
    use_dist_ckpt_deprecated: bool = option(
        False,
        "",
        group="checkpointing",
        flag="--use-dist-ckpt",
    )
    dist_ckpt_format_deprecated: str | None = option(
        None,
        "",
        group="checkpointing",
        flag="--dist-ckpt-format",
    )
    ckpt_fully_parallel_save_deprecated: bool = option(
        False,
        "",
        group="checkpointing",
        flag="--ckpt-fully-parallel-save",
    )
    fp16: bool = option(False, "", group="mixed precision")
    bf16: bool = option(False, "", group="mixed precision")
    model_parallel_size: int | None = option(None, "", group="distributed")
    moe_layer_recompute: bool = option(False, "", group="moe")
    moe_extended_tp: bool = option(False, "", group="moe")
    yaml_cfg: str | None = option(None, "", group="experimental")
    check_only: bool = option(
        False,
        "Parse, check and print the layout for --check-world-size ranks, then end: status 0 if "
        "the run could start, 1 if not. Needs no GPU and starts no process group.",
        group="device and checks",
    )
    check_world_size: int | None = option(
        None,
        "Ranks that --check-only plans for; WORLD_SIZE of the environment, or 1, if not given.",
        group="device and checks",
    )

"""Checks of low-rank adapters (LoRA)."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.distributed.sharding import is_fully_sharded
from megatron.training.config.run import RunConfig

_KINDS = ("gpt", "mamba")
_FORMATS = ("safetensors_dist", "torch_dist")


def adapters_fit_the_model(run: RunConfig) -> Iterator[str]:
    """Require a model kind with adapters, and a dropout probability."""
    a = run.adapters
    kind = run.language_model.model_kind
    if a.lora is None:
        return
    if a.lora_dropout >= 1:
        yield f"--lora-dropout {a.lora_dropout}: use a probability of at least 0 and less than 1"
    if kind not in _KINDS:
        yield (
            f"--lora-rank is not available for --model-kind {kind}, only for "
            f"{' and '.join(_KINDS)}: train the complete model"
        )


def a_stored_base_has_no_other_precision(run: RunConfig) -> Iterator[str]:
    """Refuse a base in few bits with low-precision GEMMs, and with sharded parameters."""
    a = run.adapters
    m = run.model
    if a.lora is None or a.lora_base_dtype is None:
        return
    if m.fp8 is not None or m.fp4 is not None:
        yield (
            f"--lora-base-dtype {a.lora_base_dtype} and --{m.format_flag} exclude each other: the "
            "first stores weights in few bits to save memory, the second multiplies in few bits"
        )
    if is_fully_sharded(run.ddp):
        yield (
            f"--lora-base-dtype {a.lora_base_dtype} is not available with fully sharded parameters "
            "(FSDP): use tensor parallelism, or leave it out and shard the base"
        )


def adapters_are_saved_in_formats_of_their_own(run: RunConfig) -> Iterator[str]:
    """Refuse checkpoints that cannot hold adapters without the model."""
    if run.adapters.lora is None:
        return
    c = run.checkpoint
    if c.save is not None and c.ckpt_format not in _FORMATS:
        yield (
            f"--lora-rank and --ckpt-format {c.ckpt_format} exclude each other: a checkpoint of "
            f"adapters has --ckpt-format {' or '.join(_FORMATS)}"
        )
    if c.non_persistent_ckpt_type in ("local", "in_memory"):
        yield (
            f"--lora-rank and --non-persistent-ckpt-type {c.non_persistent_ckpt_type} exclude each "
            "other: adapters are small, save them with --save-interval, or use "
            "--non-persistent-ckpt-type global"
        )
    if c.moe_use_upcycling:
        yield (
            "--lora-rank and --moe-use-upcycling exclude each other: adapters are trained on a "
            "model as it was saved; save the model with experts first"
        )

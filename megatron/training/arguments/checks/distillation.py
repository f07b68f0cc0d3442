"""Checks of distillation."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.training.config.run import PRETRAINING, SFT, RunConfig
from megatron.training.models.registry import model_kind_of


def a_teacher_is_given(run: RunConfig) -> Iterator[str]:
    """Require a teacher for the flags that describe one."""
    kd = run.distillation
    for flag, value in (
        ("--export-kd-cfg", kd.export_kd_cfg),
        ("--export-kd-teacher-ckpt-format", kd.export_kd_teacher_ckpt_format),
    ):
        if value is not None and kd.export_kd_teacher_load is None:
            yield f"{flag} {value} needs --export-kd-teacher-load: which checkpoint is the teacher?"


def distillation_compares_logits_of_gpt(run: RunConfig) -> Iterator[str]:
    """Refuse a teacher for models and objectives whose loss is not one of next tokens."""
    if not run.distillation.is_on:
        return
    kind = model_kind_of(run)
    if run.language_model.model_kind not in (None, "gpt"):
        yield (
            f"--export-kd-teacher-load with {kind.title}: distillation is implemented for "
            "pretrain_gpt.py; use that program, or leave the flag out"
        )
    if run.objective not in (PRETRAINING, SFT):
        yield (
            f"--export-kd-teacher-load with {run.objective}: distillation replaces the loss of "
            "pretraining or --sft; leave one of the two out"
        )

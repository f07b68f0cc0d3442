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


def one_method_of_distillation(run: RunConfig) -> Iterator[str]:
    """Refuse two sources of the teacher's predictions."""
    kd = run.distillation
    given = [
        f"{flag} {value}"
        for flag, value in (
            ("--export-kd-teacher-load", kd.export_kd_teacher_load),
            ("--logits-load-dir", kd.logits_load_dir),
            ("--logits-save-dir", kd.logits_save_dir),
        )
        if value is not None
    ]
    if len(given) > 1:
        yield f"{' and '.join(given)} exclude each other: keep one of them"


def distillation_compares_logits_of_gpt(run: RunConfig) -> Iterator[str]:
    """Refuse distillation of models and objectives whose loss is not one of next tokens."""
    flag = _flag(run)
    if flag is None:
        return
    kind = model_kind_of(run)
    if run.language_model.model_kind not in (None, "gpt"):
        yield (
            f"{flag} with {kind.title}: distillation is implemented for pretrain_gpt.py; use that "
            "program, or leave the flag out"
        )
    if run.objective not in (PRETRAINING, SFT):
        yield (
            f"{flag} with {run.objective}: distillation replaces the loss of pretraining or --sft; "
            "leave one of the two out"
        )


def a_store_has_samples_in_order(run: RunConfig) -> Iterator[str]:
    """Require the order of samples, and the start, by which a store is complete."""
    kd = run.distillation
    kind = run.data.dataloader_type
    for flag, folder in (
        ("--logits-save-dir", kd.logits_save_dir),
        ("--logits-load-dir", kd.logits_load_dir),
    ):
        if folder is not None and kind not in (None, "single"):
            yield f"{flag} with --dataloader-type {kind}: a store has samples in order; use single"
    if kd.logits_save_dir is not None and run.checkpoint.load and not run.checkpoint.finetune:
        yield (
            "--logits-save-dir with --load needs --finetune: the teacher then reads the training "
            "samples from the first one on"
        )


def _flag(run: RunConfig) -> str | None:
    flags = {
        "teacher": "--export-kd-teacher-load",
        "store": "--logits-load-dir",
        "save": "--logits-save-dir",
    }
    return flags.get(run.distillation.method or "")

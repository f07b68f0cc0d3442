"""Flags for knowledge distillation: a teacher beside the model, or a store of its predictions."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from megatron.core.config import flag_messages
from megatron.core.config.option import option

_kd = partial(option, group="distillation")
_logits = partial(option, group="Logits Distillation")


@dataclass(frozen=True, kw_only=True)
class DistillationConfig:
    export_kd_teacher_load: str | None = _kd(
        None,
        "Directory of the teacher's checkpoint, of any size, layout and format. The frozen teacher "
        "runs beside the model in every pass, and the loss is the distance to it.",
    )
    export_kd_cfg: str | None = _kd(
        None,
        "YAML or JSON file of the distillation loss: logit_layers, intermediate_layer_pairs, "
        "skip_lm_loss (default true), kd_loss_scale (default 1), logit_kl_temperature (default "
        "1). Needs --export-kd-teacher-load.",
    )
    export_kd_teacher_ckpt_format: str | None = _kd(
        None,
        "Format that the teacher's checkpoint must have; by default any that is recognized.",
        choices=("safetensors_dist", "torch", "torch_dist", "torch_dcp", "zarr"),
        refused_values={"zarr": flag_messages.ZARR},
    )

    logits_save_dir: str | None = _logits(
        None,
        "Folder for a store of the model's most probable tokens: the run only makes forward passes "
        "over its training samples and writes them there.",
    )
    logits_save_top_k: int | None = _logits(
        None, "Tokens to save for each position; all if not given.", at_least=1
    )
    logits_save_top_p: float | None = _logits(
        None, "Save only as many of these as have this probability together.", at_most=1
    )
    logits_save_top_p_min_k: int = _logits(
        1, "Tokens to save for each position at least, under --logits-save-top-p.", at_least=1
    )
    logits_save_dtype: str = _logits(
        "fp16", "Format of the log-probabilities.", choices=("fp16", "bf16", "fp32")
    )
    logits_load_dir: str | None = _logits(
        None, "Folder of --logits-save-dir whose predictions the model is trained towards."
    )
    logits_load_kd_loss_alpha: float = _logits(
        1.0,
        "Weight of the distance to the store in the loss; the language-modeling loss has the rest.",
        at_most=1,
    )
    logits_load_ignore_errors: bool = _logits(
        False, "Train without a distillation loss on samples that the store does not have."
    )

    @property
    def method(self) -> str | None:
        """How the loss of the run is changed: a name of `register_objectives`, or None."""
        given = {
            "teacher": self.export_kd_teacher_load,
            "store": self.logits_load_dir,
            "save": self.logits_save_dir,
        }
        return next((name for name, value in given.items() if value is not None), None)

"""Flags for knowledge distillation: an online teacher, and a store of its log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from megatron.core.config import flag_messages
from megatron.core.config.option import option

_kd = partial(option, group="distillation")


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
        "Format that the teacher's checkpoint must have; by default any that is recognised.",
        choices=("safetensors_dist", "torch", "torch_dist", "torch_dcp", "zarr"),
        refused_values={"zarr": flag_messages.ZARR},
    )

    @property
    def is_on(self) -> bool:
        """Whether the loss of the run compares the model with a teacher."""
        return self.export_kd_teacher_load is not None

"""What the formats of checkpoints cannot hold."""

from __future__ import annotations

from collections.abc import Iterable

from megatron.core.config.errors import CheckpointError
from megatron.core.dist_checkpointing.formats import FORMATS
from megatron.core.dist_checkpointing.mapping import OPTIMIZER_PREFIX
from megatron.training.models.encoders import format_problem
from megatron.training.models.registry import model_kind


def check_format(checkpoint_format: str, keys: Iterable[str], kind: str) -> None:
    """Raise CheckpointError unless the format can hold the tensors of a model of ``kind``.

    The formats torch and torch_dcp number the parameters and store the same state for each, and
    they hold no encoder of images.
    """
    if model_kind(kind).reads_images and (problem := format_problem(checkpoint_format)):
        raise CheckpointError(f"--format {problem}")
    if model_kind(kind).classifies_images and FORMATS[checkpoint_format].is_foreign:
        raise CheckpointError(
            f"--format {checkpoint_format}: Megatron-LM's image classifiers have other tensors; "
            "use safetensors_dist, or hf"
        )
    if checkpoint_format not in ("torch", "torch_dcp"):
        return
    names: dict[str, set[str]] = {}
    for key in keys:
        if key.startswith(OPTIMIZER_PREFIX) and "fp32_param" not in key:
            state, _, name = key.removeprefix(f"{OPTIMIZER_PREFIX}state.").partition(".")
            names.setdefault(state, set()).add(name)
    if any(members != next(iter(names.values())) for members in names.values()):
        raise CheckpointError(
            f"--format {checkpoint_format} has no room for state of some parameters alone, and "
            f"the checkpoint has {' and '.join(sorted(names))}: use safetensors_dist or torch_dist"
        )

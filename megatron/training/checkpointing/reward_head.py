"""A reward model that begins with the weights of a language model (--reward-model)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from megatron.core.config.errors import CheckpointError
from megatron.core.config.value_types import Arguments
from megatron.training.checkpointing.checkpoint_tensors import RunParts
from megatron.training.checkpointing.source import Source

REWARD_HEAD = "score.weight"  # keeps its initial values
_OUTPUT_LAYER = "output_layer."  # prefix of what the reward model does not have
_FLAG = "reward_model"


def begins_reward_model(parts: RunParts, saved: Arguments) -> bool:
    """Return whether the run makes a reward model of a checkpoint with flags ``saved``."""
    return _is_reward_model(parts) and not saved.get(_FLAG)


def without_output_layer(parts: RunParts) -> RunParts:
    """Return ``parts`` that need no output layer in a checkpoint, if the run has a reward model."""
    if not _is_reward_model(parts):
        return parts
    return replace(parts, unused=(*parts.unused, _OUTPUT_LAYER))


def _is_reward_model(parts: RunParts) -> bool:
    return bool((parts.asked or {}).get(_FLAG))


def check_begins(source: Source, folder: Path) -> None:
    """Raise CheckpointError unless only weights are loaded."""
    if not source["weights_only"]:
        raise CheckpointError(
            f"{folder} holds a language model, whose optimizer state does not fit a reward model: "
            "give --finetune"
        )

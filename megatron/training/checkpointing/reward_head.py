"""A reward model that begins with the weights of a language model (--reward-model)."""

from __future__ import annotations

from pathlib import Path

from megatron.core.config.errors import CheckpointError
from megatron.core.dist_checkpointing.value_types import Arguments
from megatron.training.checkpointing.source import Source

REWARD_HEAD = "score.weight"  # keeps its initial values
OUTPUT_LAYER = "output_layer."  # prefix of what the reward model does not have
_FLAG = "reward_model"


def begins_reward_model(asked: Arguments, saved: Arguments) -> bool:
    """Return whether flags ``asked`` make a reward model of a checkpoint with flags ``saved``."""
    return bool(asked.get(_FLAG)) and not saved.get(_FLAG)


def check_begins(source: Source, folder: Path) -> None:
    """Raise CheckpointError unless only weights are loaded."""
    if not source["weights_only"]:
        raise CheckpointError(
            f"{folder} holds a language model, whose optimizer state does not fit a reward model: "
            "give --finetune"
        )

"""Check what a checkpoint contains besides tensors, before any of it is restored.

A checksum proves that a file is unchanged, not that a training run wrote it.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import NotRequired, TypedDict, TypeGuard, cast

import numpy as np
import torch

from megatron.core.config.errors import CheckpointDamaged, CheckpointError
from megatron.core.config.value_types import Arguments, JsonObject
from megatron.core.dist_checkpointing import rng_json
from megatron.core.dist_checkpointing.manifest import (
    RERUN_STATE,
    RNG_STATE,
    Common,
    is_count,
    parsing,
)
from megatron.core.rerun_state_machine import RerunMode, RerunStateMachine

_TOO_LARGE = 1e300  # much larger integers cannot become a float
_NP_WORDS = 624  # of the Mersenne twister


class RunContent(TypedDict):
    """Values that a run saves besides tensors, equal on all ranks: its `Contents.common`."""

    checkpoint_version: float
    iteration: int
    counters: Mapping[str, float]
    args: Arguments
    optimizer: JsonObject | None
    opt_param_scheduler: Mapping[str, float | str] | None
    stages: NotRequired[list[list[int]]]
    objective_state: NotRequired[JsonObject | None]
    torch_version: NotRequired[str]
    python_version: NotRequired[str]


def check_common(common: Common, folder: Path) -> RunContent:
    """Return ``common`` of the checkpoint in ``folder`` if a run can resume from it.

    Raises CheckpointDamaged for a value that no run writes, CheckpointError for a checkpoint that
    was saved by the library function `dist_checkpointing.save`.
    """
    if not holds_run(common):
        raise CheckpointError(
            f"{folder} is a library checkpoint, saved by megatron.core.dist_checkpointing.save: it "
            "holds no arguments and no iteration of a training run; read it with "
            "megatron.core.dist_checkpointing.load"
        )
    optimizer, schedule = common.get("optimizer"), common.get("opt_param_scheduler")
    objective_state = common.get("objective_state")
    scaler = optimizer.get("grad_scaler") if isinstance(optimizer, dict) else None
    steps = optimizer.get("step") if isinstance(optimizer, dict) else 0
    counters = common.get("counters")
    problems = {
        "iteration": is_count(common.get("iteration")),
        "args": isinstance(common.get("args"), dict),
        "checkpoint_version": _is_number(common.get("checkpoint_version")),
        "counters": isinstance(counters, dict) and all(map(_is_number, counters.values())),
        "optimizer": optimizer is None or isinstance(optimizer, dict),
        "optimizer.step": _is_number(steps),
        "optimizer.grad_scaler": scaler is None or _is_scaler(scaler),
        "objective_state": objective_state is None or isinstance(objective_state, dict),
        "opt_param_scheduler": schedule is None or _are_plain(schedule),
    }
    for name, is_right in problems.items():
        if not is_right:
            raise CheckpointDamaged(f"{folder} is damaged: its {name} cannot be of a run")
    return cast(RunContent, {"optimizer": None, "opt_param_scheduler": None, **common})


def holds_run(common: Common) -> bool:
    """Return whether a training run saved ``common``; `dist_checkpointing.save` has other keys."""
    return not common.keys().isdisjoint(("args", "checkpoint_version", "counters", "iteration"))


def check_rank_state(state: JsonObject, where: Path) -> JsonObject:
    """Return the state of a rank if its parts can be restored.

    Raises CheckpointDamaged if a random generator or the rerun state machine does not accept its
    state.
    """
    with parsing(where):
        if RNG_STATE in state:
            _check_rng_state(state[RNG_STATE])
        if RERUN_STATE in state:
            machine = RerunStateMachine(mode=RerunMode.VALIDATE_RESULTS)
            machine.load_saved_state(state[RERUN_STATE])
    return state


def _check_rng_state(states: JsonObject) -> None:
    found = rng_json.from_json(states)
    random.Random().setstate(found["random_rng_state"])
    np.random.RandomState().set_state(found["np_rng_state"])
    position = found["np_rng_state"][2]
    if not is_count(position) or position > _NP_WORDS:  # numpy does not check this index
        raise ValueError(f"position {position!r} in numpy's state")
    torch.Generator().set_state(found["torch_rng_state"])


def _is_number(value: object) -> TypeGuard[float]:
    is_bool = isinstance(value, bool)  # which is an int
    return isinstance(value, int | float) and not is_bool and 0 <= value < _TOO_LARGE


def _is_scaler(value: object) -> bool:
    """Return whether ``value`` is the state of a loss scaler.

    Its counters are negative while steps are skipped, its scale never is.
    """
    return isinstance(value, dict) and all(
        _is_number(abs(number) if type(number) is int and name != "scale" else number)
        for name, number in value.items()
    )


def _are_plain(value: object) -> bool:
    plain = (str, int, float, bool, type(None))
    return isinstance(value, dict) and all(isinstance(item, plain) for item in value.values())

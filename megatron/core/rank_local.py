"""Rank-local global variables, for processes that run several virtual ranks.

A module registers a global variable that every rank must have for itself:
``each_rank_owns(__name__, "_x")``.  In a process with one rank this has no effect.  Virtual ranks
run one at a time; at each switch the scheduler saves the values of the rank that stops (`take`) and
restores those of the rank that continues (`put`).
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Collection

State = dict[tuple[int, str], object]

_owners: dict[int, object] = {}
_at_start: State = {}  # initial values, before any rank has written to them


def each_rank_owns(owner: object, *names: str) -> None:
    """Register the attributes ``names`` of ``owner`` (an object or a module's name) as rank-local.

    Call it before the attributes change: every rank starts with a copy of their current values.
    """
    owner = sys.modules[owner] if isinstance(owner, str) else owner
    _owners[id(owner)] = owner
    for name in names:
        _at_start[id(owner), name] = copy.deepcopy(getattr(owner, name))


def take() -> State:
    """Return the values of the running rank."""
    return {(owner, name): getattr(_owners[owner], name) for owner, name in _at_start}


def reset(keep: Collection[str] = ()) -> None:
    """Set every variable to its initial value, except those with a name in ``keep``."""
    put({place: value for place, value in take().items() if place[1] in keep})


def put(state: State) -> None:
    """Set the variables to ``state``; variables that it lacks get their initial values."""
    for (owner, name), value in _at_start.items():
        known = (owner, name) in state
        setattr(_owners[owner], name, state[owner, name] if known else copy.deepcopy(value))

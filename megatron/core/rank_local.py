"""Variables of which every rank has its own, also when several ranks share a process.

A module that keeps something in a global says so beside it: ``each_rank_owns(__name__, "_x")``.  In
a process of one rank nothing follows from that.  Virtual ranks take turns, and at each turn the
values of the rank that stops are kept and those of the one that goes on are put in their places.
"""

from __future__ import annotations

import copy
import sys

State = dict[tuple[int, str], object]

_owners: dict[int, object] = {}
_at_start: State = {}  # what stands there before a rank has written to it


def each_rank_owns(owner: object, *names: str) -> None:
    """Attributes ``names`` of ``owner``, an object or a module's name, belong to the rank.

    Called before anything is written to them, so that every rank begins with a copy of what
    stands there now.
    """
    owner = sys.modules[owner] if isinstance(owner, str) else owner
    _owners[id(owner)] = owner
    for name in names:
        _at_start[id(owner), name] = copy.deepcopy(getattr(owner, name))


def take() -> State:
    """The values of the rank that runs now."""
    return {(owner, name): getattr(_owners[owner], name) for owner, name in _at_start}


def put(state: State) -> None:
    """Make ``state`` the values of the rank that runs now; what it lacks is as at the start."""
    for (owner, name), value in _at_start.items():
        known = (owner, name) in state
        setattr(_owners[owner], name, state[owner, name] if known else copy.deepcopy(value))

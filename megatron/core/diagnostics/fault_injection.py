"""Fault injection: named points at which a test can make a run fail.

The environment variable FAULTS contains comma-separated specs
``point:kind[:rankR][:stepS][:startN][:timesT][:Xs]``, for example
``save.after_rename:kill:rank1:step3``.  Without ``rank`` or ``step`` the spec applies to every rank
or step.  ``start``: number of restarts of the run before, by its launcher and inside its processes,
for instance 0: only the first start; ``times``: maximum number of times that it fires in one
process; ``Xs``: seconds that ``slow`` sleeps (default 1).  If FAULTS is unset, a point costs one
look-up of an environment variable.

Kinds at every point: raise, kill (SIGKILL), stop (SIGSTOP), hang, exit, enospc (OSError: disk
full), oom (MemoryError), slow.  Kinds at some points: nan and bitflip, which the caller performs if
`fault_point` returns their name.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import time
from collections import Counter
from dataclasses import dataclass
from functools import cache

from megatron.core.config.errors import ConfigError
from megatron.core.rank_local import each_rank_owns

_VARIABLE = "FAULTS"
ATTEMPT = "MEGATRON_INPROCESS_ATTEMPT"  # number of restarts inside this process
_KINDS = ("raise", "kill", "stop", "hang", "exit", "enospc", "oom", "slow")
_BY_CALLER = {  # kind -> points whose caller performs it
    "nan": ("step.gradient",),  # makes the loss of a micro-batch NaN
    # in a weight; in a file after its checksum; in a result; in a file
    "bitflip": ("step.updated", "save.tensor", "check.matmul", "check.disk"),
}
# All fault points, in the order in which a run reaches them.
POINTS = (
    *("load.before", "load.tensor", "step.before", "step.gradient", "step.updated"),
    *("evaluate.iter", "save.before", "save.claimed", "save.begin", "save.write", "save.tensor"),
    *("save.before_fsync", "save.written", "save.before_manifest", "save.before_rename"),
    *("save.displaced", "save.after_rename", "save.before_tracker", "save.after_tracker"),
    *("save.before_delete", "save.in_delete", "save.copy", "inference.step"),
    *("check.matmul", "check.disk"),  # tools/check_node.py
)
_fired: Counter[_Spec] = Counter()
each_rank_owns(__name__, "_fired")


class InjectedFault(RuntimeError):
    """Exception that the kind ``raise`` raises."""


@dataclass(frozen=True)
class _Spec:
    point: str
    kind: str
    rank: int | None = None
    step: int | None = None
    start: int | None = None
    times: int | None = None
    seconds: float = 1.0

    def fires(self, point: str, step: int | None) -> bool:
        rank = int(os.environ.get("RANK", "0"))
        counts = (os.environ.get(name, "0") for name in ("TORCHELASTIC_RESTART_COUNT", ATTEMPT))
        start = sum(int(count) for count in counts)
        return (
            self.point == point
            and self.rank in (None, rank)
            and self.step in (None, step)
            and self.start in (None, start)
            and (self.times is None or _fired[self] < self.times)
        )


def check_faults() -> None:
    """Raise ConfigError if FAULTS has an unknown kind or point, or a kind its point lacks."""
    for spec in _parse(os.environ.get(_VARIABLE, "")):
        known = _BY_CALLER.get(spec.kind, POINTS)
        if spec.point not in known:
            raise ConfigError(
                f"{_VARIABLE}={spec.point}:{spec.kind}: {spec.kind} is possible at "
                f"{', '.join(known)}"
            )


def fault_point(point: str, *, step: int | None = None) -> str | None:
    """Inject the fault that FAULTS sets for ``point``, rank and ``step``, if any.

    Returns the kind if the caller must perform it, else None.
    """
    text = os.environ.get(_VARIABLE)
    if text is None:
        return None
    for spec in _parse(text):
        if spec.fires(point, step):
            _fired[spec] += 1
            return _carry_out(spec)
    return None


def flip_bit(data: bytes | memoryview) -> bytes:
    """Return ``data`` with one bit of its middle byte flipped."""
    changed = bytearray(data)
    changed[len(changed) // 2] ^= 1
    return bytes(changed)


def _carry_out(spec: _Spec) -> str | None:
    where = f"injected by {_VARIABLE} at {spec.point}"
    if spec.kind in _BY_CALLER:
        return spec.kind
    errors = {
        "raise": InjectedFault(where),
        "enospc": OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} ({where})"),
        "oom": MemoryError(where),
    }
    if spec.kind in errors:
        raise errors[spec.kind]
    if spec.kind == "exit":
        os._exit(1)
    if spec.kind in ("slow", "hang"):
        time.sleep(spec.seconds if spec.kind == "slow" else 1e9)
    else:
        os.kill(os.getpid(), signal.SIGKILL if spec.kind == "kill" else signal.SIGSTOP)
    return None


@cache
def _parse(text: str) -> tuple[_Spec, ...]:
    return tuple(_parse_one(part) for part in text.split(",") if part)


def _parse_one(text: str) -> _Spec:
    point, kind, *limits = (*text.split(":"), "")
    values: dict[str, int | float] = {}
    for limit in filter(None, limits):
        if found := re.fullmatch(r"(rank|step|start|times)(\d+)", limit):
            values[found[1]] = int(found[2])
        elif found := re.fullmatch(r"(\d+(?:\.\d+)?)s", limit):
            values["seconds"] = float(found[1])
        else:
            raise ConfigError(
                f"{_VARIABLE}={text}: {limit!r} is none of rankR, stepS, startN, timesT, Xs "
                "(seconds)"
            )
    if kind not in (*_KINDS, *_BY_CALLER):
        kinds = ", ".join((*_KINDS, *_BY_CALLER))
        raise ConfigError(f"{_VARIABLE}={text}: kind {kind!r} is none of {kinds}")
    return _Spec(point, kind, **values)  # type: ignore[arg-type]

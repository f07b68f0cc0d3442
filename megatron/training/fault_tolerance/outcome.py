"""Outcome of an attempt: how the ranks of all nodes have ended, the first cause first.

Each node describes its ranks in a `NodeReport`; `outcome_of` merges them.  The functions are pure,
so every node that has the same reports comes to the same outcome.  An attempt is one start of all
ranks.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_origin, get_type_hints

from megatron.training.process.exit_report import RERUN_CODES

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")
USER_ERROR = 2
BAD_DATA = 65
_DECISIVE = (USER_ERROR, BAD_DATA, *RERUN_CODES)
_SHOWN = 300  # characters of a reason
_SHOWN_CAUSES = 8
_LOST_CONNECTION = re.compile("onnection closed|onnection reset|roken pipe|onnection refused|store")


@dataclass(frozen=True, kw_only=True)
class RankEnd:
    """How one rank ended.  ``code`` is negative if a signal ended it, None if it was not started.

    ``report`` is its exit report (`exit_report`), ``hang`` describes why the node ended it.
    ``was_ended``: the node ended it because of another rank.
    """

    rank: int
    code: int | None
    at_s: float
    report: Mapping[str, Any] = field(default_factory=dict)
    hang: str | None = None
    hang_order: Sequence[float] = ()  # smaller: more likely the cause of the hang of others
    was_ended: bool = False

    @property
    def exit_code(self) -> int | None:
        """Exit status that the rank reports; else that of its process."""
        return self.report.get("code") or self.code

    @property
    def is_cause(self) -> bool:
        """Whether the rank failed by itself, as far as it is known."""
        if self.hang is not None or self.exit_code in _DECISIVE:
            return True
        failed = self.exit_code not in (0, None) and not self.was_ended
        return failed and self.report.get("caused_by") is None

    @property
    def reason(self) -> str:
        """Why the rank ended, without the parts that differ between ranks."""
        if self.hang is not None:
            return f"hang: {self.hang}"
        if self.report.get("reason") and self.report.get("code"):
            return str(self.report["reason"])
        if self.code is not None and self.code < 0:
            names = {s.value: s.name for s in signal.Signals}
            return f"ended by {names.get(-self.code, f'signal {-self.code}')} without a report"
        if self.code == 0:
            return f"{self.report.get('kind', 'ended')} with exit status 0"
        return f"ended with exit status {self.code} without a report"


@dataclass(frozen=True, kw_only=True)
class NodeReport:
    """The ranks of one node at the end of an attempt."""

    node: str
    ranks: tuple[RankEnd, ...] = ()
    stop_signal: int | None = None  # the signal that asked this node's supervisor to stop
    lost_store: bool = False


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Merged result of an attempt."""

    is_done: bool  # every rank ended with 0
    stop_signal: int | None
    code: int  # exit status of the first cause
    cause: str  # first cause: rank, node and reason
    signature: str  # of the cause, equal for equal causes on other ranks
    iteration: int | None
    saved_iteration: int | None
    loaded_iteration: int | None
    loaded_from: str | None
    suspects: tuple[tuple[str, str], ...]  # (node, why)
    causes: tuple[str, ...]  # of ranks and nodes, the first cause first; the last lines are a count
    was_stopped: bool = False  # ranks report that they stopped before the last iteration

    @property
    def blames_hardware(self) -> bool:
        """Whether the failure may come from faulty hardware."""
        return self.code in RERUN_CODES or bool(self.suspects)

    @property
    def resumable(self) -> bool:
        """Whether a checkpoint of the run exists."""
        return bool(self.saved_iteration or self.loaded_iteration)


def outcome_of(reports: Iterable[NodeReport], lost_nodes: Sequence[str] = ()) -> Outcome:
    """Merge the reports of the nodes; ``lost_nodes`` have sent none."""
    reports = tuple(reports)
    ranks = [(node.node, rank) for node in reports for rank in node.ranks]
    ranks.sort(key=lambda item: _order(item[1]))
    causes = [f"rank {rank.rank} on {node}: {_short(rank.reason)}" for node, rank in ranks]
    failed = next((rank for _, rank in ranks if rank.exit_code not in (0, None)), None)
    code = 1
    # Without numbers, so that ranks and steps compare.
    signature = "" if failed is None else re.sub(r"\d+", "#", failed.reason.split("\n")[0])[:_SHOWN]
    # A lost node may have caused the first failure.
    is_first = failed is not None and (not lost_nodes or failed.exit_code in _DECISIVE)
    if failed is not None and failed.is_cause and is_first:
        code = max(1, failed.exit_code or 1)
    elif lost_nodes or any(node.lost_store for node in reports):
        lost = ", ".join(lost_nodes) or "the host of the rendezvous"
        causes.insert(0, f"node lost: {lost}")
        signature = "node lost"
    signals = (node.stop_signal for node in reports if node.stop_signal is not None)
    more = len(causes) - _SHOWN_CAUSES
    shown = [*causes[:_SHOWN_CAUSES], *([f"... and {more} more"] if more > 0 else [])]
    texts = [rank.report for _, rank in ranks]
    ended = [rank.exit_code for _, rank in ranks if rank.code is not None]
    return Outcome(
        is_done=bool(ended) and not any(ended) and not lost_nodes,
        stop_signal=next(signals, None),
        code=code,
        cause=causes[0] if causes else "no rank was started",
        signature=signature,
        iteration=_largest(texts, "iteration"),
        saved_iteration=_largest(texts, "saved_iteration"),
        loaded_iteration=_largest(texts, "loaded_iteration"),
        loaded_from=next((t["loaded_from"] for t in texts if t.get("loaded_from")), None),
        suspects=tuple(_suspects(texts, {rank.rank: node for node, rank in ranks})),
        causes=tuple(shown),
        was_stopped=any(text.get("kind") == "stopped" for text in texts),
    )


def to_json(value: DataclassInstance) -> str:
    """Return a dataclass as JSON."""
    return json.dumps(asdict(value))


def from_json(kind: type[T], text: str) -> T:
    """Return the object of class ``kind`` that `to_json` has written."""
    found: T = _build(kind, json.loads(text))
    return found


def _build(kind: Any, value: Any) -> Any:
    if isinstance(kind, type) and is_dataclass(kind):
        types = get_type_hints(kind)
        return kind(**{name: _build(types[name], item) for name, item in value.items()})
    if get_origin(kind) is tuple:
        return tuple(_build(kind.__args__[0], item) for item in value)
    return value


def read_reports(folder: Path) -> dict[int, dict[str, Any]]:
    """Return the exit reports in ``folder`` by rank; unreadable ones are left out."""
    found = {}
    for path in folder.glob("rank_*.json"):
        try:
            report = json.loads(path.read_text())
            found[int(report["rank"])] = report
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return found


def _order(rank: RankEnd) -> tuple[bool, bool, bool, list[float], float]:
    """Causes before consequences, hangs by likelihood, then by time.

    A lost connection is the consequence of another rank's end, even if that rank reports nothing.
    """
    at_s = float(rank.report.get("time_s", rank.at_s))
    is_echo = rank.code is not None and bool(_LOST_CONNECTION.search(rank.reason))
    return (not rank.is_cause, is_echo, rank.hang is None, list(rank.hang_order), at_s)


def _suspects(
    texts: Iterable[Mapping[str, Any]], homes: Mapping[int, str]
) -> Iterable[tuple[str, str]]:
    seen = set()
    for text in texts:
        for suspect in text.get("suspects", ()):
            node = homes.get(suspect.get("rank")) or suspect.get("host")
            if node and node not in seen:
                seen.add(node)
                yield node, str(suspect.get("why"))


def _largest(texts: Iterable[Mapping[str, Any]], name: str) -> int | None:
    return max((t[name] for t in texts if isinstance(t.get(name), int)), default=None)


def _short(reason: str) -> str:
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    text = "; ".join(lines[:3])
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."

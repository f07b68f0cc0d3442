"""Outcome of an attempt, and the policy of restarts that follows from it.

Pure: no processes, files or clock, so every node that has the same reports comes to the same
outcome and the same decision.  An attempt is one start of all ranks.  Each node describes how its
ranks ended in a `NodeReport`; `outcome_of` merges them, the first cause first.

`decide`, in this order: a stop signal ends the run; errors that no restart cures end it; a run that
makes no progress is restarted a limited number of times.  Of failures that repeat at the same step,
the second is answered with another rank placement, which separates faulty hardware from software;
the third with the checkpoint before the loaded one, which may be the cause; the next ends the run.
A rejected result that other placements reproduced (exit status 17 that blames no rank) counts as
the third.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_origin, get_type_hints

from megatron.training.process import exit_report

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")
USER_ERROR = 2
BAD_DATA = 65
_DECISIVE = (USER_ERROR, BAD_DATA, *exit_report.RERUN_CODES)
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
        return self.code in exit_report.RERUN_CODES or bool(self.suspects)

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


FAILED_VALIDATION = 17
_MAX_BACKOFF_S = 60.0


@dataclass(frozen=True)
class Options:
    """Limits of restarts, and times in seconds; the fields are flags of the supervisor."""

    max_restarts: int = 100
    max_no_progress_restarts: int = 3
    min_progress_iterations: int = 200
    restart_backoff: float = 1.0
    peer_timeout: float = 15.0  # for ranks to end by themselves after another rank's failure
    shutdown_timeout: float = 30.0  # for ranks to save and stop after a stop signal
    node_timeout: float = 30.0  # without a sign of life of a node


@dataclass(frozen=True, kw_only=True)
class History:
    """State of the policy.  Nodes exchange it: the one with the most attempts is valid."""

    attempts: int = 0
    outcomes: tuple[Outcome, ...] = ()  # of the attempts
    restarts: int = 0
    no_progress: int = 0  # restarts since the last progress
    saved_iteration: int = -1  # largest of all attempts
    iteration: int = -1  # largest at the last progress
    failures: tuple[tuple[str, int | None], ...] = ()  # signature, step; since the last progress
    placement: int = 0  # rotation of the ranks
    ckpt_step: int | None = None  # checkpoint to load in place of the newest one
    blamed: tuple[int, ...] = ()  # iterations of checkpoints that are not loaded
    excluded: tuple[str, ...] = ()  # nodes


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What follows: a restart with ``history``, or the end of the run with ``code``."""

    why: str
    history: History
    restarts: bool = False
    code: int = 0
    backoff_s: float = 0.0


def decide(
    history: History,
    outcome: Outcome,
    options: Options,
    *,
    has_spare_node: bool = False,
    is_join: bool = False,
    older_checkpoint: Callable[[str], int | None] = lambda folder: None,
) -> Decision:
    """Return what follows ``outcome``.

    ``is_join``: the attempt was ended so that further nodes can join.  ``older_checkpoint`` returns
    the iteration of the checkpoint before the one in a folder, None if there is none.
    """
    outcomes = (*history.outcomes, outcome)
    history = replace(history, attempts=history.attempts + 1, outcomes=outcomes)
    if outcome.stop_signal is not None:
        code = 0 if outcome.is_done else 128 + outcome.stop_signal
        return Decision(code=code, why="stopped by a signal", history=history)
    if outcome.is_done and not (is_join and outcome.was_stopped):
        why = "stopped as asked" if outcome.was_stopped else "done"
        return Decision(why=why, history=history)
    if is_join:
        history = _note_checkpoints(history, outcome)
        return Decision(restarts=True, why="further nodes join", history=history)
    if outcome.code in (USER_ERROR, BAD_DATA):
        return _stop(history, outcome, f"no restart cures exit status {outcome.code}")
    history = _count_failure(history, outcome, options)
    decision = _restart(history, outcome, options, has_spare_node, older_checkpoint)
    if decision.restarts and history.restarts >= options.max_restarts:
        why = f"--max-restarts {options.max_restarts} is reached"
        return _stop(history, outcome, why)
    if decision.restarts and history.no_progress > options.max_no_progress_restarts:
        why = (
            f"{history.no_progress - 1} restarts without a new checkpoint or "
            f"{options.min_progress_iterations} new steps (--max-no-progress-restarts)"
        )
        return _stop(history, outcome, why)
    return decision


def _restart(
    history: History,
    outcome: Outcome,
    options: Options,
    has_spare_node: bool,
    older_checkpoint: Callable[[str], int | None],
) -> Decision:
    num_equal = history.failures.count((outcome.signature, outcome.iteration))
    suspects = tuple(node for node, _ in outcome.suspects if node not in history.excluded)
    # Ranks that reproduce a rejected result on another start blame nobody.
    is_reproducible = outcome.code == FAILED_VALIDATION and not outcome.suspects
    why = "failed"
    if suspects and has_spare_node:
        history = replace(history, excluded=(*history.excluded, suspects[0]))
        why = f"node {suspects[0]} is excluded"
    elif is_reproducible or (not outcome.blames_hardware and num_equal > 2):
        step = None
        if outcome.loaded_from is not None and not history.blamed:
            step = older_checkpoint(outcome.loaded_from)
        if step is None:
            times = "a rejected result on every start"
            if not is_reproducible:
                times = f"the same failure {num_equal} times"
            return _stop(
                history,
                outcome,
                f"{times} at iteration {outcome.iteration}, on different rank placements: it is "
                "deterministic",
            )
        blamed = outcome.loaded_iteration
        history = replace(
            history,
            ckpt_step=step,
            blamed=history.blamed if blamed is None else (*history.blamed, blamed),
        )
        why = f"the checkpoint of iteration {blamed} is blamed, that of {step} is loaded"
    elif outcome.blames_hardware or num_equal == 2:
        history = replace(history, placement=history.placement + 1)
        is_unexpected = outcome.blames_hardware
        cause = "an unexpected result" if is_unexpected else "the same failure at the same step"
        why = f"another rank placement, after {cause}"
    exponent = max(0, history.no_progress - 1)
    return Decision(
        restarts=True,
        why=why,
        history=replace(history, restarts=history.restarts + 1),
        backoff_s=min(_MAX_BACKOFF_S, options.restart_backoff * 2**exponent),
    )


def _stop(history: History, outcome: Outcome, why: str) -> Decision:
    return Decision(code=outcome.code, why=why, history=history)


def _count_failure(history: History, outcome: Outcome, options: Options) -> History:
    """Return ``history`` with this failure; progress forgets the failures before it."""
    failure = outcome.signature, outcome.iteration
    advanced = _note_checkpoints(history, outcome)
    iteration = -1 if outcome.iteration is None else outcome.iteration
    is_progress = (
        advanced.saved_iteration > history.saved_iteration
        or iteration >= history.iteration + options.min_progress_iterations
    )
    if is_progress:
        return replace(advanced, no_progress=1, failures=(failure,), iteration=iteration)
    failures = (*history.failures, failure)
    return replace(advanced, no_progress=history.no_progress + 1, failures=failures)


def _note_checkpoints(history: History, outcome: Outcome) -> History:
    """Return ``history`` with the checkpoints of an attempt; a new one ends the choice of a step.

    The new checkpoint is the newest one by order of publication, also after an older one was
    loaded.
    """
    if outcome.saved_iteration is None:
        return history
    saved = max(history.saved_iteration, outcome.saved_iteration)
    if outcome.saved_iteration <= (outcome.loaded_iteration or -1):
        return history
    blamed = history.blamed if saved == history.saved_iteration else ()
    return replace(history, saved_iteration=saved, ckpt_step=None, blamed=blamed)


def exit_text(decision: Decision) -> str:
    """Return exit.json: exit status, reason, resumable, and the outcome of each attempt."""
    history = decision.history
    last = history.outcomes[-1] if history.outcomes else None
    is_unfinished = last is None or not last.is_done or last.was_stopped
    is_resumable = is_unfinished and last is not None and last.resumable
    is_stopped = last is not None and (last.stop_signal is not None or last.was_stopped)
    content = {
        "code": decision.code,
        "kind": "stopped" if is_stopped else exit_report.kind_of(decision.code),
        "reason": decision.why,
        "first_cause": last.cause if last and not last.is_done else None,
        "resumable": decision.code not in (USER_ERROR, BAD_DATA) and is_resumable,
        "iteration": last.iteration if last else None,
        "saved_iteration": last.saved_iteration if last else None,
        "attempts": history.attempts,
        "restarts": history.restarts,
        "excluded_nodes": history.excluded,
        "blamed_checkpoints": history.blamed,
        "outcomes": [asdict(outcome) for outcome in history.outcomes],
    }
    return json.dumps(content, indent=1)

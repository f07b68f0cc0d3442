"""Policy of restarts: what follows the end of an attempt.  Pure: no processes, files or clock.

In this order: a stop signal ends the run; errors that no restart cures end it; a run that makes no
progress is restarted a limited number of times.  Of failures that repeat at the same step, the
second is answered with another rank placement, which separates faulty hardware from software; the
third with the checkpoint before the loaded one, which may be the cause; the next ends the run.
A rejected result that other placements reproduced (exit status 17 that blames no rank) counts as
the third.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from megatron.training.fault_tolerance.outcome import BAD_DATA, USER_ERROR, Outcome
from megatron.training.process import exit_report

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

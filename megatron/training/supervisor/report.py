"""Report of the run: ``exit.json`` and a few lines at the end of the output."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from megatron.core.config.errors import ConfigError
from megatron.training.supervisor.evidence import Outcome
from megatron.training.supervisor.policy import Decision

_SHOWN = 8  # causes


def log(text: str) -> None:
    """Print a line of the supervisor to standard error."""
    print(f"[supervisor] {text}", file=sys.stderr, flush=True)


def exit_text(decision: Decision, outcomes: Sequence[Outcome]) -> str:
    """Return exit.json: exit status, reason, resumable, and the outcome of each attempt."""
    last = outcomes[-1] if outcomes else None
    history = decision.history
    content = {
        "code": decision.code,
        "kind": kind_of(decision, last),
        "reason": decision.why,
        "first_cause": last.cause if last and not last.is_done else None,
        "resumable": decision.code not in (2, 65) and _is_unfinished(last) and has_checkpoint(last),
        "iteration": last.iteration if last else None,
        "saved_iteration": last.saved_iteration if last else None,
        "attempts": history.attempts,
        "restarts": history.restarts,
        "excluded_nodes": history.excluded,
        "blamed_checkpoints": history.blamed,
        "outcomes": [asdict(outcome) for outcome in outcomes],
    }
    return json.dumps(content, indent=1)


def write_exit(folder: Path, text: str) -> None:
    """Write ``exit.json``."""
    path = folder / "exit.json"
    draft = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        draft.write_text(text)
        draft.replace(path)
    except OSError as error:
        log(f"cannot write {path}: {error.strerror}")


def kind_of(decision: Decision, outcome: Outcome | None) -> str:
    """Return done, stopped, user_error, rerun or failed, as in the exit report of a rank."""
    if outcome is not None and (outcome.stop_signal is not None or outcome.was_stopped):
        return "stopped"
    return {0: "done", 2: "user_error", 16: "rerun", 17: "rerun"}.get(decision.code, "failed")


def print_end(folder: Path, decision: Decision, outcome: Outcome) -> None:
    """Print one report over all ranks, the first cause first."""
    history = decision.history
    log(
        f"{'the run ended' if decision.code == 0 else 'the run failed'}: {decision.why} "
        f"(exit status {decision.code}, {history.restarts} restarts)"
    )
    if decision.code not in (0, ConfigError.exit_code):  # that message is printed already
        print_causes(outcome)
    log(f"report: {folder / 'exit.json'}")


def print_causes(outcome: Outcome) -> None:
    """Print how the ranks ended, the first cause first."""
    for cause in outcome.causes[:_SHOWN]:
        log(f"  {cause}")
    if len(outcome.causes) > _SHOWN:
        log(f"  ... and {len(outcome.causes) - _SHOWN} more")


def has_checkpoint(outcome: Outcome | None) -> bool:
    """Return whether a checkpoint of the run is known."""
    return outcome is not None and outcome.resumable


def _is_unfinished(outcome: Outcome | None) -> bool:
    return outcome is None or not outcome.is_done or outcome.was_stopped

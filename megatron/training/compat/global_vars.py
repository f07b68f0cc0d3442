"""The current run, for scripts; nothing inside ``megatron/`` calls get_args()."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.core.diagnostics.timers import Timers
from megatron.core.rank_local import each_rank_owns
from megatron.training.runtime.context import RunContext
from megatron.training.runtime.flat_namespace import ReadOnlyNamespace, legacy_namespace, refresh
from megatron.training.step.run import ModelRun
from megatron.training.tokenizer.base import MegatronTokenizer

_run: RunContext | None = None
_namespace: ReadOnlyNamespace | None = None
each_rank_owns(__name__, "_run", "_namespace")


def set_run(run: RunContext | None) -> None:
    """Set or clear the run from which the functions of this module return values."""
    global _run, _namespace
    if _namespace is not None and run is not None and _run is not None and run.state is _run.state:
        _namespace.bind(run)  # the same run with more parts: scripts may have stored its namespace
    else:
        _namespace = None
    _run = run


def current_run() -> RunContext | None:
    """Return the current run: a context, from the model on a ModelRun; None before start-up."""
    return _run


def get_run() -> RunContext:
    """Return the current run.  Raises RuntimeError before start-up."""
    if _run is None:
        raise RuntimeError("nothing runs yet: call pretrain() or initialize_megatron() first")
    return _run


def get_args() -> ReadOnlyNamespace:
    """Return configuration and counters as Megatron-LM's flat namespace, read-only.

    It is one object for the whole run; each call updates its counters.
    """
    global _namespace
    if _namespace is None:
        _namespace = legacy_namespace(get_run())
    else:
        refresh(_namespace, get_run())
    return _namespace


def get_tokenizer() -> MegatronTokenizer:
    """Return the tokenizer of the run."""
    return get_run().tokenizer


def get_timers() -> Timers:
    """Return the timers of the run."""
    return get_run().timers


def get_tensorboard_writer() -> Any:
    """Return the TensorBoard writer on the last rank, else None."""
    return _writers().get("tensorboard")


def get_wandb_writer() -> Any:
    """Return the W&B run on the last rank, else None."""
    return _writers().get("wandb")


def _writers() -> Mapping[str, Any]:
    run = get_run()
    return run.callbacks.writers() if isinstance(run, ModelRun) else {}

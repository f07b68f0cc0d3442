"""The current Runtime, for scripts; nothing inside ``megatron/`` calls get_args()."""

from __future__ import annotations

from typing import Any

from megatron.core.diagnostics.timers import Timers
from megatron.core.rank_local import each_rank_owns
from megatron.training.runtime.flat_namespace import ReadOnlyNamespace, legacy_namespace, refresh
from megatron.training.runtime.runtime import Runtime
from megatron.training.tokenizer.base import MegatronTokenizer

_runtime: Runtime | None = None
_namespace: ReadOnlyNamespace | None = None
each_rank_owns(__name__, "_runtime", "_namespace")


def set_run(run: Runtime | None) -> None:
    """Set or clear the run from which the functions of this module return values."""
    global _runtime, _namespace
    _runtime, _namespace = run, None


def get_run() -> Runtime:
    """Return the current Runtime.  Raises RuntimeError before start-up."""
    if _runtime is None:
        raise RuntimeError("nothing runs yet: call pretrain() or initialize_megatron() first")
    return _runtime


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
    tokenizer = get_run().tokenizer
    assert tokenizer is not None, "setup_tokenizer() builds it"
    return tokenizer


def get_timers() -> Timers:
    """Return the timers of the run."""
    return get_run().timers


def get_tensorboard_writer() -> Any:
    """Return the TensorBoard writer on the last rank, else None."""
    return get_run().callbacks.tensorboard_writer()


def get_wandb_writer() -> Any:
    """Return the W&B run on the last rank, else None."""
    return get_run().callbacks.wandb_writer()

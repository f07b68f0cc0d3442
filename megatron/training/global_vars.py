"""One variable, the running Runtime, for scripts; nothing inside ``megatron/`` calls get_args."""

from __future__ import annotations

from typing import Any

from megatron.core.timers import Timers
from megatron.training.arguments.legacy import legacy_namespace
from megatron.training.runtime import Runtime

_runtime: Runtime | None = None


def set_run(run: Runtime | None) -> None:
    """Make ``run`` what the functions below answer from."""
    global _runtime
    _runtime = run


def get_run() -> Runtime:
    """The running Runtime."""
    if _runtime is None:
        raise RuntimeError("nothing runs yet: call pretrain() or initialize_megatron() first")
    return _runtime


def get_args() -> Any:
    """A read-only copy of the configuration and the counters, in the old flat form."""
    return legacy_namespace(get_run())


def get_tokenizer() -> Any:
    """The tokenizer of the run."""
    return get_run().tokenizer


def get_timers() -> Timers:
    """The timers of the run."""
    return get_run().timers


def get_tensorboard_writer() -> Any:
    """The TensorBoard writer on the last rank, else None."""
    return get_run().callbacks.tensorboard_writer()


def get_wandb_writer() -> Any:
    """The W&B run on the last rank, else None."""
    return get_run().callbacks.wandb_writer()

"""Settings and counters of a run as one read-only namespace, like Megatron-LM's args.

get_args() returns it to scripts, and checkpoints in Megatron-LM's formats store it.  Nothing else
inside ``megatron/`` reads it.
"""

from __future__ import annotations

import os
from argparse import Namespace
from dataclasses import replace
from typing import Any

from megatron.core.config.errors import ConfigError
from megatron.core.utils import PaddedSize
from megatron.training.arguments.flat_values import COUNTERS, flat_values
from megatron.training.arguments.sections import flags_and_defaults
from megatron.training.process.rank_print import rank
from megatron.training.runtime.context import RunContext

_SETTABLE = "exit_on_missing_checkpoint"


class ReadOnlyNamespace(Namespace):
    """Namespace whose attributes cannot be set; the error message explains how to change a value.

    Megatron-LM's scripts assign two kinds of values, which are accepted: the value that an
    attribute has already, and exit_on_missing_checkpoint, which the next load_checkpoint() obeys.
    A copy (copy.copy, pickle) is a plain, writable Namespace.
    """

    __slots__ = ("_run",)  # not among the values

    def __init__(self, run: RunContext) -> None:
        super().__init__()
        self.bind(run)

    def bind(self, run: RunContext) -> None:
        """Take the values from ``run`` from now on."""
        object.__setattr__(self, "_run", run)

    def __setattr__(self, name: str, value: Any) -> None:
        values = vars(self)
        is_same = name in values and values[name] == value
        if is_same and isinstance(values[name], bool) is isinstance(value, bool):
            return
        if name == _SETTABLE and isinstance(value, bool):
            run: RunContext = self._run
            checkpoint = replace(run.config.checkpoint, exit_on_missing_checkpoint=value)
            run.config = replace(run.config, checkpoint=checkpoint)
            values[name] = value
            return
        if name in flags_and_defaults():
            cure = f"set {flags_and_defaults()[name][0]} or give pretrain() args_defaults"
        elif name in (*COUNTERS, "curr_iteration"):
            cure = "steps are counted by pretrain(), train_step() and load_checkpoint()"
        else:
            cure = "write to copy.copy(get_args()), or keep the value in a variable of your own"
        raise ConfigError(f"get_args() is read-only, {name} = {value!r} changes nothing: {cure}")

    def __delattr__(self, name: str) -> None:
        raise ConfigError(f"get_args() is read-only: deleting {name} would change nothing")

    def __reduce__(self) -> tuple[type[Namespace], tuple[()], dict[str, Any]]:
        return Namespace, (), dict(vars(self))


def legacy_namespace(run: RunContext) -> ReadOnlyNamespace:
    """Return configuration and counters of a run as a flat namespace, like Megatron-LM's args."""
    namespace = ReadOnlyNamespace(run)
    values = flat_values(run.config)
    vars(namespace).update(
        values,
        rank=rank(),
        local_rank=int(os.environ.get("LOCAL_RANK", run.config.distributed.local_rank)),
        padded_vocab_size=run.padded_vocab_size
        if run.config.language_model.pad_vocab_in_loss
        else PaddedSize(run.padded_vocab_size, run.tokenizer.vocab_size),
    )
    refresh(namespace, run)
    return namespace


def refresh(namespace: Namespace, run: RunContext) -> None:
    """Update the values of ``namespace`` that change during the run, such as the counters.

    Called by every get_args(), so it must stay cheap.
    """
    values, state = vars(namespace), vars(run.state)
    for name in COUNTERS:
        values[name] = state[name]
    values["curr_iteration"] = state["iteration"]
    if run.train_iters:
        values["train_iters"] = run.train_iters

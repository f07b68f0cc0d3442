"""The current run, for scripts; nothing inside ``megatron/`` calls get_args()."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from megatron.core.config.errors import ConfigError
from megatron.core.diagnostics.timers import Timers
from megatron.core.num_microbatches_calculator import NumMicroBatchesCalculator
from megatron.core.parallel.default_groups import default_groups
from megatron.core.rank_local import each_rank_owns
from megatron.training.arguments.flat_values import COUNTERS, resolve_args
from megatron.training.process.rank_print import rank, world_size
from megatron.training.runtime.context import RunContext
from megatron.training.runtime.flat_namespace import ReadOnlyNamespace, legacy_namespace, refresh
from megatron.training.runtime.setup import build_context
from megatron.training.step.run import ModelRun
from megatron.training.tokenizer.base import MegatronTokenizer

_run: RunContext | None = None
_namespace: ReadOnlyNamespace | None = None
_args: Namespace | None = None  # of set_args(); the script may change them at any time
_known: dict[str, Any] = {}  # values of _args when the run last followed them
each_rank_owns(__name__, "_run", "_namespace", "_args", "_known")


def set_run(run: RunContext | None) -> None:
    """Set or clear the run from which the functions of this module return values."""
    global _run, _namespace, _args
    if _namespace is not None and run is not None and _run is not None and run.state is _run.state:
        _namespace.bind(run)  # the same run with more parts: scripts may have stored its namespace
    else:
        _namespace = None
    if run is None or _run is None or run.state is not _run.state:
        _args = None  # this run has arguments of its own
    _run = run


def current_run() -> RunContext | None:
    """Return the current run: a context, from the model on a ModelRun; None before start-up."""
    return _run


class NothingRuns(RuntimeError, AssertionError):
    """There is no run: before start-up, or after `destroy_global_vars`."""


def unset_global_variables() -> None:
    """Forget the run and its arguments, so that a program can start another one."""
    set_run(None)


destroy_global_vars = unset_global_variables


def get_run() -> RunContext:
    """Return the current run.  Raises NothingRuns before start-up."""
    if _args is not None:
        _follow(_args)
    if _run is None:
        raise NothingRuns("nothing runs yet: call pretrain() or initialize_megatron() first")
    return _run


def set_args(args: Namespace) -> None:
    """Make ``args`` what `get_args` returns, for programs that start without this project's loop.

    ``args`` come from parse_args() or validate_args(), and stay writable.  Functions that need a
    run create it from them, with the installed process groups; after a change of ``args`` they use
    the new values.
    """
    global _args, _known
    set_run(None)
    _args = args
    _known = {}


def set_global_variables(args: Namespace, build_tokenizer: bool = True) -> None:
    """Call `set_args`.  The tokenizer is built when it is first used, if at all."""
    del build_tokenizer
    set_args(args)


def _build_tokenizer(args: Namespace) -> MegatronTokenizer:
    """Return the tokenizer of ``args``.  Collective over all ranks."""
    if args is not _args:
        set_args(args)
    return get_tokenizer()


def _follow(args: Namespace) -> None:
    """Create the run of ``args``, or configure it anew after they have changed."""
    global _run, _known
    values = vars(args)
    if _run is None:
        try:
            config = resolve_args(args, world_size(), trains=False)
        except KeyError as error:
            raise ConfigError(
                f"the arguments of set_args() lack {error}: take those of parse_args(), and add to "
                "them"
            ) from None
        _run = build_context(config, default_groups(), started_at_s=time.time())
        values.setdefault("rank", rank())
        values["padded_vocab_size"] = _run.padded_vocab_size
    elif any(_is_new(name, value) for name, value in values.items()):
        counters = {name: values[name] for name in COUNTERS if values[name] != _known[name]}
        _run.state.load(counters)
        _run.config = resolve_args(args, _run.config.world_size, trains=_run.config.trains)
        config = _run.config
        _run.batches = NumMicroBatchesCalculator.from_config(
            config.training, config.data_parallel_size
        )
    else:
        return
    refresh(args, _run)
    _known = dict(values)


def _is_new(name: str, value: object) -> bool:
    return name not in _known or (_known[name] is not value and _known[name] != value)


def get_args() -> Namespace:
    """Return configuration and counters as Megatron-LM's flat namespace, read-only.

    It is one object for the whole run; each call updates its counters.  After `set_args` it is the
    script's own namespace.
    """
    global _namespace
    if _args is not None:
        if _run is not None:
            _follow(_args)
            refresh(_args, _run)
            _known.update({name: vars(_args)[name] for name in COUNTERS})
        return _args
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

"""Megatron-LM's function for in-process restart: NVIDIA's wrapper where it is installed.

Without the package nvidia-resiliency-ext, `pretrain` itself restarts with --inprocess-restart.
NVIDIA's wrapper has its own monitor processes, rank assignment and store (at MASTER_PORT + 2, in
the process of rank 0); it is the child process that the launcher sees, so the launcher must
tolerate the end of a rank.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megatron.core import optional
from megatron.training.fault_tolerance.inprocess.abort import abort, clear, sockets
from megatron.training.fault_tolerance.inprocess.options import RestartOptions
from megatron.training.initialize import restart_options

_PACKAGE = "nvidia_resiliency_ext.inprocess"
_STORE, _WRAPPER_STORE = 1, 2  # added to MASTER_PORT


def maybe_wrap_for_inprocess_restart(
    pretrain: Callable[..., None],
) -> tuple[Callable[..., None], dist.Store | None]:
    """Return ``pretrain``, wrapped with --inprocess-restart, and the store to pass to it.

    Returns the function unchanged, and None, without the flag or without NVIDIA's package.
    """
    options = restart_options(None, None)
    if options is None or not optional.available(_PACKAGE):
        return pretrain, None
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]) + _STORE,
        is_master=os.environ["RANK"] == "0",
        wait_for_workers=False,
        timeout=timedelta(seconds=options.flags.inprocess_barrier_timeout),
    )
    return _wrapped(pretrain, options, optional.require(_PACKAGE, "--inprocess-restart")), store


def _wrapped(
    pretrain: Callable[..., None], options: RestartOptions, inprocess: Any
) -> Callable[..., None]:
    def call(*args: Any, inprocess_call_wrapper: Any = None, **kwargs: Any) -> None:
        pretrain(*args, inprocess_call_wrapper=inprocess_call_wrapper, **kwargs)

    # NVIDIA's wrapper passes itself to the argument with this annotation.
    call.__annotations__ = {"inprocess_call_wrapper": inprocess.CallWrapper}
    flags = options.flags
    active = options.active
    before: dict[str, int] = {}

    def remember_sockets(state: Any) -> Any:
        before.clear()
        before.update(sockets())
        return state

    def leave_collectives(state: Any) -> Any:
        abort(before, int(os.environ["MASTER_PORT"]) + _STORE, with_store=True)
        return state

    def finalize(state: Any) -> Any:
        clear(empty_cache=flags.inprocess_empty_cuda_cache)
        return state

    intervals = ("monitor_thread_interval", "monitor_process_interval", "heartbeat_interval")
    times = (
        *(*intervals, "progress_watchdog_interval", "soft_timeout", "hard_timeout"),
        *("heartbeat_timeout", "barrier_timeout", "completion_timeout", "last_call_wait"),
        "termination_grace_time",
    )
    wrapper = inprocess.Wrapper(
        store_kwargs={
            "port": int(os.environ["MASTER_PORT"]) + _WRAPPER_STORE,
            "timeout": timedelta(seconds=flags.inprocess_barrier_timeout),
        },
        initialize=inprocess.Compose(
            _part(inprocess.initialize.Initialize, remember_sockets),
            inprocess.initialize.RetryController(
                max_iterations=flags.inprocess_max_iterations,
                min_world_size=active,
                min_active_world_size=active,
            ),
        ),
        abort=_part(inprocess.abort.Abort, leave_collectives),
        finalize=_part(inprocess.finalize.Finalize, finalize),
        rank_assignment=inprocess.rank_assignment.Tree(_layers(options, inprocess)),
        **{name: timedelta(seconds=vars(flags)[f"inprocess_{name}"]) for name in times},
    )
    wrapped: Callable[..., None] = wrapper(call)
    return wrapped


def _part(base: type, function: Callable[[Any], Any]) -> Any:
    """Return an instance of a subclass of ``base`` whose call is ``function(state)``."""
    return type(base.__name__, (base,), {"__call__": lambda self, state: function(state)})()


def _layers(options: RestartOptions, inprocess: Any) -> Sequence[Any]:
    """Return the levels at which a lost rank is replaced: the world, and with granularity node."""
    module = inprocess.rank_assignment
    layer = module.Layer
    reserve = module.LayerFlag.RESERVE
    layers = [layer(min_ranks=options.active, max_ranks=options.active, flag=reserve)]
    if options.flags.inprocess_granularity == "node":
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        node = socket.gethostname()
        layers.append(
            layer(min_ranks=ranks, max_ranks=ranks, key_or_fn=lambda _: node, flag=reserve)
        )
    return layers

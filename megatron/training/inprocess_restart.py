"""In-process restart (--inprocess-restart): NVIDIA's wrapper calls `pretrain` again after a fault.

The package nvidia-resiliency-ext has the monitor processes, the rank assignment and a store (at
MASTER_PORT + 2, in the process of rank 0).  The ranks are the processes of the launcher, which must
tolerate the end of a rank.  This module passes the flags to the wrapper, and clears what an attempt
leaves in the process.
"""

from __future__ import annotations

import gc
import os
import socket
import sys
import threading
from collections.abc import Callable, Container, Iterator
from contextlib import suppress
from dataclasses import fields
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megatron.core import device, optional, rank_local
from megatron.core.config.errors import ConfigError
from megatron.core.diagnostics.fault_injection import ATTEMPT
from megatron.training.arguments.parser import parse_args
from megatron.training.config.resilience import ResilienceConfig
from megatron.training.process import exit_report
from megatron.training.process.preflight import launch_problems, needs_rendezvous

_FLAG = "--inprocess-restart"
_PACKAGE = "nvidia_resiliency_ext.inprocess"
# Added to MASTER_PORT.
_STORE = 1
_WRAPPER_STORE = 2
# Variables that the next attempt needs: faults that were injected, values for the exit report.
_KEPT = ("_fired", "_noted", "_suspects")
# Name of the threads that write checkpoints, and time for a pending write to end.
_SAVES = "checkpoint"
_WRITING_S = 60.0
# By default NCCL's watchdogs end the process within a tenth of a second of another rank's end, for
# errors of NCCL and of CUDA.
_WATCHDOG = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_RETHROW_CUDA_ERRORS")


def maybe_wrap_for_inprocess_restart(
    pretrain: Callable[..., None],
) -> tuple[Callable[..., None], dist.Store | None]:
    """Return ``pretrain``, wrapped with --inprocess-restart, and the store to pass to it.

    Returns the function unchanged, and None, without the flag and where the wrapper cannot be used:
    then `pretrain` reports `problems`.
    """
    flags = _flags()
    if flags is None:
        return pretrain, None
    for name in _WATCHDOG:
        os.environ.setdefault(name, "0")
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]) + _STORE,
        is_master=os.environ["RANK"] == "0",
        wait_for_workers=False,
        timeout=timedelta(seconds=flags.inprocess_barrier_timeout),
    )
    return _wrap(pretrain, flags, optional.require(_PACKAGE, _FLAG)), store


def problems() -> Iterator[str]:
    """Yield why --inprocess-restart is not possible in this process."""
    if ATTEMPT in os.environ:
        return
    if (reason := optional.why_missing(_PACKAGE)) is not None:
        yield (
            f'{_FLAG}: {reason}; pip install "megatron-train[ft]", or omit the flag and start the '
            "run with tools/launch.py, which restarts it in new processes"
        )
    else:
        yield (
            f"{_FLAG} needs processes that torchrun or another launcher has started, and a script "
            "that calls pretrain(); without them use tools/launch.py"
        )


def begin_attempt(wrapper: Any, store: dist.Store | None) -> tuple[int, dist.Store | None]:
    """Return the number of this call of the training function, and the store for its groups.

    ``wrapper`` is the ``inprocess_call_wrapper`` of `pretrain`.
    """
    number: int = wrapper.iteration
    os.environ[ATTEMPT] = str(number)
    return number, store and dist.PrefixStore(f"attempt/{number}", store)


def _flags() -> ResilienceConfig | None:
    if not any(flag in " ".join(sys.argv) for flag in (_FLAG, "--yaml-cfg", "--config")):
        return None
    if not needs_rendezvous(os.environ) or launch_problems(os.environ) or dist.is_initialized():
        return None
    try:
        asked = vars(parse_args(ignore_unknown_args=True))
    except ConfigError:  # `pretrain` reports it
        return None
    is_run = asked["virtual_ranks"] is None and not asked["check_only"]
    if not asked["inprocess_restart"] or not is_run or not optional.available(_PACKAGE):
        return None
    return ResilienceConfig(**{f.name: asked[f.name] for f in fields(ResilienceConfig)})


def _call_in(base: type, function: Callable[[], object]) -> Any:
    """Return an instance of NVIDIA's class ``base`` that calls ``function``."""

    def run(self: object, state: Any) -> Any:
        function()
        return state

    return type(base.__name__, (base,), {"__call__": run})()


def _wrap(
    pretrain: Callable[..., None], flags: ResilienceConfig, inprocess: Any
) -> Callable[..., None]:
    def call(*args: Any, inprocess_call_wrapper: Any = None, **kwargs: Any) -> None:
        pretrain(*args, inprocess_call_wrapper=inprocess_call_wrapper, **kwargs)

    # NVIDIA's wrapper passes itself to the argument with this annotation.
    call.__annotations__ = {"inprocess_call_wrapper": inprocess.CallWrapper}
    active = flags.inprocess_active_world_size
    assignment = inprocess.rank_assignment
    reserve = assignment.LayerFlag.RESERVE
    layers = [assignment.Layer(min_ranks=active, max_ranks=active, flag=reserve)]
    if flags.inprocess_granularity == "node":  # a lost rank takes its node with it
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        node = socket.gethostname()
        layers.append(
            assignment.Layer(
                min_ranks=ranks, max_ranks=ranks, key_or_fn=lambda _: node, flag=reserve
            )
        )

    before: dict[str, int] = {}  # sockets at the begin of the attempt

    def note_sockets() -> None:
        before.clear()
        before.update(_sockets())

    abort = inprocess.abort
    wrapper = inprocess.Wrapper(
        store_kwargs={
            "port": int(os.environ["MASTER_PORT"]) + _WRAPPER_STORE,
            "timeout": timedelta(seconds=flags.inprocess_barrier_timeout),
        },
        initialize=inprocess.Compose(
            _call_in(inprocess.initialize.Initialize, note_sockets),
            inprocess.initialize.RetryController(
                max_iterations=flags.inprocess_max_iterations,
                min_world_size=active,
                min_active_world_size=active,
            ),
        ),
        abort=inprocess.Compose(  # called from the last to the first
            _call_in(abort.Abort, lambda: _close_connections(before)),
            abort.AbortTransformerEngine(),
            abort.AbortTorchDistributed(),
        ),
        finalize=_call_in(
            inprocess.finalize.Finalize, lambda: _clear(flags.inprocess_empty_cuda_cache)
        ),
        health_check=inprocess.health_check.CudaHealthCheck(),
        rank_assignment=assignment.Tree(layers),
        monitor_thread_interval=timedelta(seconds=flags.inprocess_monitor_thread_interval),
        monitor_process_interval=timedelta(seconds=flags.inprocess_monitor_process_interval),
        progress_watchdog_interval=timedelta(seconds=flags.inprocess_progress_watchdog_interval),
        heartbeat_interval=timedelta(seconds=flags.inprocess_heartbeat_interval),
        heartbeat_timeout=timedelta(seconds=flags.inprocess_heartbeat_timeout),
        soft_timeout=timedelta(seconds=flags.inprocess_soft_timeout),
        hard_timeout=timedelta(seconds=flags.inprocess_hard_timeout),
        barrier_timeout=timedelta(seconds=flags.inprocess_barrier_timeout),
        completion_timeout=timedelta(seconds=flags.inprocess_completion_timeout),
        last_call_wait=timedelta(seconds=flags.inprocess_last_call_wait),
        termination_grace_time=timedelta(seconds=flags.inprocess_termination_grace_time),
    )
    restarting: Callable[..., None] = wrapper(call)

    def run(*args: Any, **kwargs: Any) -> None:
        try:
            restarting(*args, **kwargs)
        except BaseException as error:
            exit_report.write_error(error)
            raise

    return run


def _clear(empties_cache: bool) -> None:
    """Release the state of the attempt that this process has left, in the main thread."""
    if dist.is_initialized():
        with suppress(RuntimeError, ValueError):
            dist.destroy_process_group()
    for thread in threading.enumerate():
        if thread.name == _SAVES:
            thread.join(_WRITING_S)
    gc.enable()  # --manual-gc switches it off
    gc.collect()
    if empties_cache:
        device.empty_cache()
    rank_local.reset(_KEPT)


def _sockets() -> dict[str, int]:
    """Return the sockets of this process: the kernel's name -> file descriptor."""
    found: dict[str, int] = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:"):
                found[target] = int(name)
    return found


def _close_connections(before: Container[str]) -> None:
    """Let the waiting collectives of gloo raise an error, on this rank and on its peers.

    Gloo's groups cannot be aborted (their ``abort`` does nothing in torch 2.13), so NVIDIA's abort
    leaves a rank in its collective.  The sockets in ``before`` stay open, and so do listening ones:
    gloo ends the process when its listener fails.
    """
    for name, descriptor in _sockets().items():
        if name in before:
            continue
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            is_ip = connection.family in (socket.AF_INET, socket.AF_INET6)
            if is_ip and not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                connection.shutdown(socket.SHUT_RDWR)

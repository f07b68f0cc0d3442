"""Leave collectives that will never complete, and clear the state of an attempt.

NCCL's process groups can be aborted.  Their watchdog threads would end the process first, within a
tenth of a second of another rank's end: see `outlive_nccl_errors`.

Gloo's groups cannot be aborted (their ``abort`` does nothing in torch 2.13): their connections are
shut down, and each waiting collective then raises an error, on this rank and on its peers.
Connections that existed before the attempt are left alone, and listening sockets: gloo ends the
process when its listener fails.
"""

from __future__ import annotations

import gc
import os
import socket
import sys
import threading
from contextlib import suppress

import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron.core import device, rank_local

# Variables that an attempt must not reset: faults that were injected, values for the exit report.
_KEPT = ("_fired", "_noted", "_suspects")
_SAVES = "checkpoint"  # name of the threads that write checkpoints
_WRITING_S = 60.0  # for a pending write of this process to end
# What a watchdog does with errors of NCCL and of CUDA; torch ends the process by default.
_WATCHDOG = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_RETHROW_CUDA_ERRORS")


def outlive_nccl_errors() -> None:
    """Let the watchdogs of process groups only log errors, unless the environment decides.

    `abort` leaves the collectives instead.  Call it before process groups are created.
    """
    for name in _WATCHDOG:
        os.environ.setdefault(name, "0")


def sockets() -> dict[str, int]:
    """Return the TCP sockets of this process: kernel's name -> file descriptor."""
    found: dict[str, int] = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:"):
                found[target] = int(name)
    return found


def abort(before: dict[str, int], store_port: int, *, with_store: bool) -> None:
    """Make the waiting collectives of this process raise an error.  Called by any thread.

    ``before``: `sockets` at the begin of the attempt.  ``with_store``: also close the connections
    of the attempt to the store, for a rank that waits there for absent ranks.
    """
    if dist.is_initialized() and dist.get_backend() == dist.Backend.NCCL:
        with suppress(RuntimeError, ValueError):
            distributed_c10d._abort_process_group()
    for name, descriptor in sockets().items():
        if name not in before:
            with suppress(OSError):
                _shut_down(descriptor, store_port, with_store)


def _shut_down(descriptor: int, store_port: int, with_store: bool) -> None:
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        if connection.family not in (socket.AF_INET, socket.AF_INET6):
            return
        if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return
        if with_store or connection.getpeername()[1] != store_port:
            connection.shutdown(socket.SHUT_RDWR)


def clear(*, empty_cache: bool) -> bool:
    """Release the state of the attempt that this process has left.  Call it in the main thread.

    Returns whether the device still works.
    """
    is_healthy = True
    if dist.is_initialized():
        with suppress(RuntimeError, ValueError):
            dist.destroy_process_group()
    for thread in threading.enumerate():
        if thread.name == _SAVES:
            thread.join(_WRITING_S)
    gc.enable()  # --manual-gc switches it off
    gc.collect()
    try:
        device.synchronize()  # an error of a kernel makes all later calls fail
        if empty_cache:
            device.empty_cache()
    except RuntimeError as error:
        print(f"the device does not work any more: {error}", file=sys.stderr, flush=True)
        is_healthy = False
    rank_local.reset(_KEPT)
    return is_healthy

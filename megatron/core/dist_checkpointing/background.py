"""Asynchronous saves: write a checkpoint while training continues.

A thread of each rank copies the values to host memory while the next forward and backward passes
run, which do not change them; training waits before the optimizer step until the copies are made
(`BackgroundSave.wait_for_copies`).  The thread then writes, checksums and fsyncs.  On rank 0
another call publishes in a thread.

Order of collectives: only the main thread communicates.  Between steps, while a save is pending,
one all-reduce checks whether all ranks have finished their part, so the order of collectives does
not depend on the speed of a disk.

The host memory is allocated once and reused by later saves.  It is page-locked if the tensors are
on a GPU, for copies at full bus speed.  torch rounds the size of page-locked memory up to a power
of two: so it is allocated in blocks.

After an exception ranks no longer reach the same collectives; `finish_apart` then completes the
save through a key-value store.
"""

from __future__ import annotations

import copy
import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from math import prod
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core import device
from megatron.core.config.value_types import JsonObject, Nested
from megatron.core.dist_checkpointing.all_ranks import (
    PendingSave,
    SaveResult,
    complete,
    conclude,
    not_written,
    write,
)
from megatron.core.dist_checkpointing.records import Piece, TensorRecord, TensorRecords
from megatron.core.parallel.collectives import gather_json, is_so_everywhere
from megatron.core.parallel.run_store import LOST_RANKS, RunStore

T = TypeVar("T")
_APART = "finish_apart"  # prefix of the keys {prefix}/{rank} and {prefix}/verdict
_BEAT_S = 1.0  # interval of the heartbeats of a rank that is still writing
_LOOK_S = 0.05  # polling interval of the store
_PATIENCE_S = 5.0  # time without a heartbeat of any rank after which ranks count as lost
_WRITING_S = 600.0  # time limit of a write, so that a hanging disk does not block a failed run


def _begin(call: Callable[[], T]) -> Future[T]:
    """Run ``call`` in a new daemon thread.

    The future does not refer to the call, which refers to the save that holds the future: a full
    garbage collection, which would free such a cycle with the copied tensors, may be thousands of
    steps away.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)
            raise

    threading.Thread(target=run, name="checkpoint", daemon=True).start()
    return future


def _result(future: Future[T], beat: Callable[[], object] | None = None) -> T:
    """Wait for the call and return its result.

    With ``beat``, call it once a second meanwhile, and raise RuntimeError after `_WRITING_S`.
    """
    until_s = time.monotonic() + _WRITING_S
    while beat is not None and not future.done():
        if time.monotonic() > until_s:
            raise RuntimeError(f"the disk did not complete the write within {_WRITING_S:.0f} s")
        beat()
        futures.wait([future], _BEAT_S)
    has_failed = future.exception() is not None
    assert not has_failed, "the thread that saves has failed; its traceback stands above"
    return future.result()


class BackgroundSave:
    """An asynchronous save: copies the tensors of ``begun`` into ``buffer``, then writes them.

    Every rank constructs one and calls its methods in the same order.  ``buffer`` must not be
    reused before the save is published or has failed.  ``waited_s``: time that training has spent
    in `wait_for_copies`.
    """

    def __init__(self, begun: PendingSave, buffer: HostBuffer, group: ProcessGroup | None) -> None:
        self.iteration = begun.iteration
        self.waited_s = 0.0
        self._begun = detach(begun)
        self._group = group
        self._copied = threading.Event()
        self._writing = _begin(partial(self._copy_and_write, buffer, device.side_stream()))
        self._completing: Future[JsonObject | None] | None = None

    def wait_for_copies(self) -> None:
        """Wait until the tensors are copied and the optimizer may change them.  Not collective."""
        began_s = time.perf_counter()
        self._copied.wait()
        self.waited_s += time.perf_counter() - began_s

    def poll(self) -> SaveResult | None:
        """Return the checkpoint if it is published, else None.  Collective.

        Raises SaveFailed on every rank if any rank failed: then nothing was published.
        """
        if not is_so_everywhere((self._completing or self._writing).done(), self._group):
            return None
        if self._completing is not None:
            return conclude(self._begun, _result(self._completing), self._group)
        reports = gather_json(_result(self._writing), self._group)
        self._completing = _begin(
            lambda: None if reports is None else complete(self._begun, reports)
        )
        return None

    def wait(self) -> SaveResult:
        """Wait for the checkpoint to be published.  Collective.  Raises as `poll` does."""
        saved = None
        while saved is None:
            self.wait_for_threads()
            saved = self.poll()
        return saved

    def finish_apart(self, store: RunStore, rank: int, world_size: int) -> SaveResult | None:
        """Complete the save through ``store``; see `finish_apart`."""
        if self._completing is None and store.add(LOST_RANKS, 0):
            raise RuntimeError("a rank has ended before it has written its part")
        beat = partial(store.add, f"{_APART}/beats", 1)
        _put(store, str(rank), _result(self._writing, beat))
        if rank == 0:
            verdict = None
            try:
                if self._completing is None:
                    absent = not_written(RuntimeError("it had no pending save"))
                    found = _wait_for_values(store, *map(str, range(world_size)))
                    reports = [report or absent for report in found]
                    self._completing = _begin(partial(complete, self._begun, reports))
                verdict = _result(self._completing, beat)
            finally:  # also after an error, so that no rank waits for the verdict
                _put(store, "verdict", verdict)
        (verdict,) = _wait_for_values(store, "verdict")
        return verdict and conclude(self._begun, verdict, None)

    def wait_for_threads(self) -> None:
        """Wait until the threads of this rank have ended.  Not collective."""
        futures.wait([self._writing])
        if self._completing is not None:
            futures.wait([self._completing])

    def _copy_and_write(self, buffer: HostBuffer, stream: device.Stream | None) -> JsonObject:
        device.use_in_this_thread()
        try:
            with device.on_stream(stream):
                copies = snapshot(self._begun, buffer)
        except (MemoryError, RuntimeError) as error:  # torch cannot allocate the copies
            return not_written(error)
        finally:
            self._copied.set()
        return write(copies)


def finish_apart(
    pending: BackgroundSave | None, store: RunStore, rank: int, world_size: int
) -> SaveResult | None:
    """Complete a pending save after an exception; return None if there is none.

    Not collective: every surviving rank calls it, whatever the others do.  Raises SaveFailed, and
    RuntimeError if a rank or the store is lost.
    """
    if pending is not None:
        return pending.finish_apart(store, rank, world_size)
    _put(store, str(rank), None)
    if rank == 0:
        _put(store, "verdict", None)
    return None


def _put(store: RunStore, name: str, value: JsonObject | None) -> None:
    store.set(f"{_APART}/{name}", json.dumps(value))


def _wait_for_values(store: RunStore, *names: str) -> list[Nested]:
    """Wait for values as long as some rank sends heartbeats.  Raises RuntimeError."""
    beats, alive_at_s, began_s = -1, time.monotonic(), time.monotonic()
    while None in (texts := [store.get(f"{_APART}/{name}") for name in names]):
        before, beats, now_s = beats, store.add(f"{_APART}/beats", 0), time.monotonic()
        if beats != before:
            alive_at_s = now_s
        if now_s - alive_at_s > _PATIENCE_S or now_s - began_s > _WRITING_S:
            raise RuntimeError("a rank does not answer")
        time.sleep(_LOOK_S)
    return [json.loads(text) for text in texts if text is not None]


_ALIGNMENT = 64
_BLOCK_BYTES = 2**30


class HostBuffer:
    """Host memory for one snapshot at a time; it grows to the largest size requested."""

    def __init__(self) -> None:
        self._blocks: list[Tensor] = []

    def reserve(self, sizes: Sequence[int]) -> list[Tensor]:
        """Return memory of each of ``sizes`` in bytes; this invalidates an earlier snapshot.

        A block holds several of them up to 1 GiB, or a larger one alone.
        """
        filled: list[int] = []  # bytes used in each block
        places = []
        for size in sizes:
            if not filled or filled[-1] + size > _BLOCK_BYTES:
                filled.append(0)
            places.append((len(filled) - 1, filled[-1]))
            filled[-1] += size
        for i, used in enumerate(filled):
            if i == len(self._blocks):
                self._blocks.append(torch.empty(0))
            if self._blocks[i].numel() < used:
                self._blocks[i] = torch.empty(0)  # free it before the larger one is allocated
                self._blocks[i] = device.host_memory(used)
        return [
            self._blocks[block][start : start + size]
            for (block, start), size in zip(places, sizes, strict=True)
        ]


@torch.no_grad()
def copy_out(tensors: TensorRecords, buffer: HostBuffer) -> list[TensorRecord]:
    """Return the same records with copies in ``buffer``, in the dtype of the file.

    Blocks until the copies are complete.
    """
    sizes = [
        -(-prod(piece.shape) * tensor.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        for tensor in tensors
        for piece in tensor.pieces
    ]
    places = iter(buffer.reserve(sizes))
    copies = []
    for tensor in tensors:
        pieces = []
        for piece in tensor.pieces:
            place = next(places)[: prod(piece.shape) * tensor.dtype.itemsize]
            copied = place.view(tensor.dtype).view(piece.shape)
            pieces.append(Piece(piece.offset, copied.copy_(piece.data, non_blocking=True)))
        copies.append(replace(tensor, pieces=tuple(pieces)))
    device.finish_stream()
    return copies


def detach(begun: PendingSave) -> PendingSave:
    """Return the save with copies of the Python values and buffers that a forward pass may change.

    Parameters are not copied: they change only in the optimizer step.  Not collective.
    """
    contents = replace(
        begun.contents,
        tensors=(),
        rank_state=copy.deepcopy(begun.contents.rank_state),
        common=copy.deepcopy(begun.contents.common),
    )
    buffers = [tensor for tensor in begun.tensors if tensor.is_buffer]
    copied = dict(zip(buffers, copy_out(buffers, HostBuffer()), strict=True))
    tensors = [copied.get(tensor, tensor) for tensor in begun.tensors]
    return replace(begun, tensors=tensors, contents=contents)


def snapshot(begun: PendingSave, buffer: HostBuffer) -> PendingSave:
    """Return the save with all tensors copied to ``buffer``.  Not collective, any thread."""
    return replace(begun, tensors=copy_out(begun.tensors, buffer))

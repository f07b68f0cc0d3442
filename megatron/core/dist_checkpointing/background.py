"""A save that is written while training goes on.

A thread of each rank copies the values while the next forward and backward passes run, which change
none of them: training waits before the optimizer steps, if the copies are not made by then.  The
thread then writes, checksums and fsyncs.  Publishing, on rank 0, is in a thread too.
Whether all ranks are that far is asked between steps: one all-reduce of a number, while a save is
pending.  Threads never communicate, so no order of collectives depends on a disk.

When an exception ends a run its ranks no longer meet; `finish_apart` ends a save through a store.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from torch.distributed import ProcessGroup

from megatron.core import device
from megatron.core.dist_checkpointing.collectives import gather_json, is_so_everywhere
from megatron.core.dist_checkpointing.serialization import (
    PendingSave,
    SaveResult,
    conclude,
    detach,
    not_written,
    publish,
    snapshot,
    write,
)
from megatron.core.dist_checkpointing.snapshot import HostBuffer
from megatron.core.parallel.run_store import LOST_RANKS, RunStore

Start = Callable[[Callable[[], None]], None]  # makes a call in another thread
_APART = "finish_apart"  # / rank, and / verdict
_BEAT_S = 1.0  # a rank that is still at it says so this often
_LOOK_S = 0.05
_PATIENCE_S = 5.0  # for the other ranks, once nobody says so any more
_WRITING_S = 600.0  # a disk that hangs does not keep a failed run alive


class Worker:
    """One thread for all saves; a call that raises ends it, and another takes its place.

    It does not keep the process alive.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        start_in_thread(self._serve)

    def start(self, call: Callable[[], None]) -> None:
        """Let the thread make ``call`` after those before it."""
        self._calls.put(call)

    def _serve(self) -> None:
        try:
            while True:
                call = self._calls.get()
                call()
                del call  # it holds the tensors of a save
        finally:  # the call has raised, which its save notices; the next ones need a thread
            start_in_thread(self._serve)


def start_in_thread(call: Callable[[], None]) -> None:
    """Make ``call`` in a thread of its own, which does not keep the process alive."""
    threading.Thread(target=call, name="checkpoint", daemon=True).start()


class _Task:
    """A call in another thread."""

    def __init__(self, call: Callable[[], Any], start: Start) -> None:
        self._call: Callable[[], Any] | None = call
        self._results: list[Any] = []
        self._done = threading.Event()
        start(self._run)

    def _run(self) -> None:
        assert self._call is not None
        try:
            self._results.append(self._call())
        finally:
            # It refers to the save, and the save to this task.  Only a full garbage collection,
            # thousands of steps later, would free such a cycle, with all that the save has copied.
            self._call = None
            self._done.set()

    def is_alive(self) -> bool:
        """Whether the call has not returned yet."""
        return not self._done.is_set()

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until the call has returned."""
        self._done.wait(timeout_s)

    def result(self, beat: Callable[[], object] | None = None) -> Any:
        """What the call returned; waits for it.

        With ``beat``, which is called all the while, RuntimeError after `_WRITING_S`.
        """
        until_s = time.monotonic() + _WRITING_S
        while beat is not None and self.is_alive():
            if time.monotonic() > until_s:
                raise RuntimeError(f"the disk has not taken it within {_WRITING_S:.0f} s")
            beat()
            self.join(_BEAT_S)
        self.join()
        assert self._results, "the thread that saves has failed; its traceback stands above"
        return self._results[0]


class BackgroundSave:
    """Starts to copy what ``begun`` is to write into ``buffer``, and then to write it.

    Every rank makes one, and calls its methods in the same order.  ``buffer`` is in use until the
    save is over.  ``waited_s``: how long `wait_for_copies` has held up training.  ``start``: by
    default a thread for each call, else that of a `Worker`.
    """

    def __init__(
        self,
        begun: PendingSave,
        buffer: HostBuffer,
        group: ProcessGroup | None,
        start: Start = start_in_thread,
    ) -> None:
        self.iteration = begun.iteration
        self._start = start
        self.waited_s = 0.0
        self._begun = detach(begun)
        self._group = group
        self._copied = threading.Event()
        self._writing = _Task(partial(self._copy_and_write, buffer, device.side_stream()), start)
        self._publishing: _Task | None = None

    def wait_for_copies(self) -> None:
        """Return when the values may change.  Local."""
        began_s = time.perf_counter()
        self._copied.wait()
        self.waited_s += time.perf_counter() - began_s

    def poll(self) -> SaveResult | None:
        """The checkpoint once it is published, None before.  Collective.

        Raises SaveFailed on every rank if any rank failed: then nothing was published.
        """
        task = self._publishing or self._writing
        if not is_so_everywhere(not task.is_alive(), self._group):
            return None
        if self._publishing is not None:
            return conclude(self._begun, self._publishing.result(), self._group)
        reports = gather_json(self._writing.result(), self._group)
        self._publishing = _Task(
            lambda: None if reports is None else publish(self._begun, reports), self._start
        )
        return None

    def wait(self) -> SaveResult:
        """The published checkpoint.  Collective.  Raises as `poll` does."""
        while True:
            (self._publishing or self._writing).join()
            saved = self.poll()
            if saved is not None:
                return saved

    @property
    def is_written(self) -> bool:
        """Whether all ranks have written, so that only rank 0 has something to do."""
        return self._publishing is not None

    def written(self, beat: Callable[[], object]) -> dict[str, Any]:
        """What `write` has returned on this rank; waits for it.  Not collective."""
        report: dict[str, Any] = self._writing.result(beat)
        return report

    def publish_apart(
        self, reports: Callable[[], list[Any]], beat: Callable[[], object]
    ) -> dict[str, Any]:
        """On rank 0, what `publish` returns.  ``reports()``: what each rank has `written`."""
        if self._publishing is None:
            absent = not_written(RuntimeError("it had no such save"))
            told = [report or absent for report in reports()]
            self._publishing = _Task(partial(publish, self._begun, told), self._start)
        verdict: dict[str, Any] = self._publishing.result(beat)
        return verdict

    def conclude_apart(self, verdict: dict[str, Any]) -> SaveResult:
        """What `conclude` makes of it.  Not collective."""
        return conclude(self._begun, verdict, None)

    def _copy_and_write(self, buffer: HostBuffer, stream: Any) -> dict[str, Any]:
        device.use_in_this_thread()
        try:
            with device.on_stream(stream):
                copies = snapshot(self._begun, buffer)
        except (MemoryError, RuntimeError) as error:  # torch has no room for the copies
            return not_written(error)
        finally:
            self._copied.set()
        return write(copies)


def finish_apart(
    pending: BackgroundSave | None, store: RunStore, rank: int, world_size: int
) -> SaveResult | None:
    """The published checkpoint; None where there is nothing to be finished.

    Not collective: every rank that lives calls it, wherever the others are.  Raises SaveFailed,
    and RuntimeError where a rank or the store is gone.
    """
    if pending is not None and not pending.is_written and store.add(LOST_RANKS, 0):
        raise RuntimeError("a rank has ended before it has written its part")
    beat = partial(store.add, f"{_APART}/beats", 1)
    _put(store, str(rank), pending and pending.written(beat))
    if rank == 0:
        verdict = None
        try:
            verdict = pending and pending.publish_apart(
                lambda: _take(store, *map(str, range(world_size))), beat
            )
        finally:  # nobody need wait for it any longer
            _put(store, "verdict", verdict)
    if pending is None:
        return None
    (verdict,) = _take(store, "verdict")
    return verdict and pending.conclude_apart(verdict)


def _put(store: RunStore, name: str, value: Any) -> None:
    store.set(f"{_APART}/{name}", json.dumps(value))


def _take(store: RunStore, *names: str) -> list[Any]:
    """Wait for values as long as some rank says that it is at work.  Raises RuntimeError."""
    beats, alive_at_s, began_s = -1, time.monotonic(), time.monotonic()
    while None in (texts := [store.get(f"{_APART}/{name}") for name in names]):
        before, beats, now_s = beats, store.add(f"{_APART}/beats", 0), time.monotonic()
        if beats != before:
            alive_at_s = now_s
        if now_s - alive_at_s > _PATIENCE_S or now_s - began_s > _WRITING_S:
            raise RuntimeError("a rank does not answer")
        time.sleep(_LOOK_S)
    return [json.loads(text) for text in texts if text is not None]

"""A save that is written while training goes on.

The values are copied first, and training waits for that alone.  A thread of each rank then writes,
checksums and fsyncs; these give the interpreter free.  Publishing, on rank 0, is in a thread too.
Whether all ranks are that far is asked between steps: one all-reduce of a number, while a save is
pending.  Threads never communicate, so no order of collectives depends on a disk.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from torch.distributed import ProcessGroup

from megatron.core.dist_checkpointing.collectives import gather_json, is_so_everywhere
from megatron.core.dist_checkpointing.serialization import (
    Begun,
    Saved,
    conclude,
    not_written,
    publish,
    snapshot,
    write,
)
from megatron.core.dist_checkpointing.snapshot import HostBuffer


class _Task(threading.Thread):
    """A call in a thread, which does not keep a process alive that wants to end."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__(name="checkpoint", daemon=True)
        self._call = call
        self._results: list[Any] = []
        self.start()

    def run(self) -> None:
        self._results.append(self._call())

    def result(self) -> Any:
        """What the call returned; waits for it."""
        self.join()
        assert self._results, "the thread that saves has failed; its traceback stands above"
        return self._results[0]


class BackgroundSave:
    """Copies what ``begun`` is to write into ``buffer`` and starts to write it.

    Every rank makes one, and calls its methods in the same order.  ``buffer`` is in use until the
    save is over.
    """

    def __init__(self, begun: Begun, buffer: HostBuffer, group: ProcessGroup | None) -> None:
        self.iteration = begun.iteration
        self._begun = begun
        self._group = group
        self._is_written = False
        self._task = _Task(self._writing(buffer))

    def poll(self) -> Saved | None:
        """The checkpoint once it is published, None before.  Collective.

        Raises SaveFailed on every rank if any rank failed: then nothing was published.
        """
        if not is_so_everywhere(not self._task.is_alive(), self._group):
            return None
        if self._is_written:
            return conclude(self._begun, self._task.result(), self._group)
        self._is_written = True
        reports = gather_json(self._task.result(), self._group)
        self._task = _Task(lambda: None if reports is None else publish(self._begun, reports))
        return None

    def wait(self) -> Saved:
        """The published checkpoint.  Collective.  Raises as `poll` does."""
        while True:
            self._task.join()
            saved = self.poll()
            if saved is not None:
                return saved

    def _writing(self, buffer: HostBuffer) -> Callable[[], Any]:
        """What the thread does; the copies are made when this returns."""
        try:
            self._begun = snapshot(self._begun, buffer)
        except (MemoryError, RuntimeError) as error:  # torch has no room for the copies
            return partial(not_written, error)
        return partial(write, self._begun)

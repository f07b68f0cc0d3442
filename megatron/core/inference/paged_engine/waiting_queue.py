"""Requests that wait for their start, in the order of their arrival."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from megatron.core.inference.paged_engine.request_state import RequestState


class WaitingQueue:
    """A heap by arrival: a pre-empted request is first again.

    A removed request leaves its entry in the heap until that is first, or until such entries are
    most of the heap: `remove` takes constant time on average.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], RequestState]] = []
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def push(self, state: RequestState) -> None:
        """Add a request that is not in the queue and was not removed from it."""
        state.is_queued = True
        heappush(self._heap, (state.order, state))
        self._size += 1

    def first(self) -> RequestState:
        """Return the request that arrived first."""
        while not self._heap[0][1].is_queued:
            heappop(self._heap)
        return self._heap[0][1]

    def pop(self) -> None:
        """Remove the request that `first` has returned."""
        heappop(self._heap)[1].is_queued = False
        self._size -= 1

    def remove(self, state: RequestState) -> None:
        """Remove a request for good, wherever it is in the queue."""
        state.is_queued = False
        self._size -= 1
        if len(self._heap) > 2 * self._size + 64:
            self._heap = [entry for entry in self._heap if entry[1].is_queued]
            heapify(self._heap)

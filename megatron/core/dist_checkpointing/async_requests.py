"""Requests that write in the background and then conclude on all ranks, as Megatron Core has them.

`AsyncCallsQueue` runs each request in a thread of this process.  Order of collectives: for each
check of an unfinished request one all-reduce, and those of its ``finalize_fns`` after it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import MappingProxyType
from typing import Any, NamedTuple

import torch.distributed as dist

from megatron.core.parallel.collectives import is_so_everywhere, wait_for_ranks


class AsyncRequest(NamedTuple):
    """A call that may run in the background, and calls that follow it on all ranks.

    ``async_fn`` (None: nothing to do) does not communicate.  ``finalize_fns`` are called in order
    by the main thread once ``async_fn`` has returned on all ranks.  ``preload_fn``, if there is
    one, is called before training goes on, and its result is the second argument of ``async_fn``.
    """

    async_fn: Callable[..., object] | None
    async_fn_args: tuple[Any, ...]
    finalize_fns: list[Callable[[], object]]
    async_fn_kwargs: Mapping[str, Any] = MappingProxyType({})
    preload_fn: Callable[[], Any] | None = None
    is_frozen: bool = False
    call_idx: int = 0

    def add_finalize_fn(self, fn: Callable[[], object]) -> None:
        """Append a call that follows the others.  Raises RuntimeError if the request is frozen."""
        if self.is_frozen:
            raise RuntimeError("Cannot add finalization functions to a frozen AsyncRequest")
        self.finalize_fns.append(fn)

    def preloaded(self) -> AsyncRequest:
        """Return the request with the result of ``preload_fn``, which is called now."""
        if self.preload_fn is None or self.async_fn is None:
            return self
        first, _, *others = self.async_fn_args
        return self._replace(async_fn_args=(first, self.preload_fn(), *others), preload_fn=None)

    def run(self) -> None:
        """Do the work of this rank.  Not collective."""
        if self.async_fn is not None:
            self.async_fn(*self.async_fn_args, **self.async_fn_kwargs)

    def execute_sync(self) -> None:
        """Do all of it now.  Collective."""
        self.preloaded().run()
        if dist.is_initialized():
            wait_for_ranks()
        for call in self.finalize_fns:
            call()

    def freeze(self) -> AsyncRequest:
        """Return the request, to which no more calls can be appended."""
        return self._replace(is_frozen=True)


class AsyncCallsQueue:
    """Requests in the order in which they were scheduled; ``persistent`` has no effect."""

    def __init__(self, persistent: bool = False) -> None:
        del persistent
        self._threads = ThreadPoolExecutor(1, "checkpoint")  # one after the other, as they came
        self._active: deque[tuple[int, AsyncRequest, Future[None]]] = deque()
        self.call_idx = -1

    def schedule_async_request(self, async_request: AsyncRequest) -> int:
        """Start the request; return its number, counted from 0."""
        self.call_idx += 1
        request = async_request.freeze().preloaded()
        self._active.append((self.call_idx, request, self._threads.submit(request.run)))
        return self.call_idx

    def maybe_finalize_async_calls(
        self, blocking: bool = False, no_dist: bool = False
    ) -> list[int]:
        """Conclude the requests that are done on all ranks; return their numbers.  Collective.

        ``blocking`` waits for all.  With ``no_dist`` each rank looks at its own thread only.
        """
        group = dist.group.WORLD if dist.is_initialized() and not no_dist else None
        concluded = []
        while self._active:
            number, request, future = self._active[0]
            if blocking:
                wait([future])
            if not is_so_everywhere(future.done(), group):
                break
            self._active.popleft()
            future.result()
            for call in request.finalize_fns:
                call()
            concluded.append(number)
        return concluded

    def get_num_unfinalized_calls(self) -> int:
        """Return how many requests are not concluded."""
        return len(self._active)

    def close(self, abort: bool = False) -> None:
        """Conclude all requests; with ``abort`` forget those that have not begun."""
        if abort:
            self._active.clear()
        else:
            self.maybe_finalize_async_calls(blocking=True)
        self._threads.shutdown(wait=not abort, cancel_futures=True)

"""A stream of partial answers from the thread of an engine to a coroutine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

from megatron.core.inference.inference_request import InferenceRequest

_END = object()


class AsyncStream:
    """Items of one request; made in a running event loop, filled from any thread."""

    def __init__(self, request_id: int, cancel: Callable[[int], None]) -> None:
        """``cancel`` is called with ``request_id`` if the reader stops before the end."""
        self._request_id = request_id
        self._cancel = cancel
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[object] = asyncio.Queue()
        self._is_finished = False

    def put(self, item: InferenceRequest | Exception) -> None:
        """Append an item, or an exception that the reader gets; ignored after the end."""
        if not self._is_finished:
            self._loop.call_soon_threadsafe(self._queue.put_nowait, item)

    def finish(self, exception: BaseException | type[BaseException] | None = None) -> None:
        """End the stream, with ``exception`` raised in the reader if given."""
        if not self._is_finished:
            self._is_finished = True
            end = _END if exception is None else exception
            self._loop.call_soon_threadsafe(self._queue.put_nowait, end)

    @property
    def finished(self) -> bool:
        """Whether the stream has ended."""
        return self._is_finished

    async def generator(self) -> AsyncGenerator[InferenceRequest, None]:
        """Yield the items; an abandoned generator cancels the request."""
        is_ended = False
        try:
            while True:
                item = await self._queue.get()
                if item is _END:
                    is_ended = True
                    return
                if isinstance(item, BaseException | type):
                    is_ended = True
                    raise item
                assert isinstance(item, InferenceRequest), "put() takes requests and exceptions"
                yield item
        finally:
            if not is_ended:
                self._cancel(self._request_id)

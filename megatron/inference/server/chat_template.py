"""From chat messages to the text of a prompt, by the tokenizer's chat template."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Mapping
from typing import Any

from megatron.core.limited_processes import LimitedProcesses, exceeded, receive, send
from megatron.inference.server import template_worker
from megatron.inference.server.errors import ApiError

_PATIENCE_S = 60.0  # with a process that is stopped, or has no processor


class ChatTemplate:
    """A template, rendered by a process of its own that is replaced when it has to be ended."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._lock = asyncio.Lock()
        self._processes = LimitedProcesses(template_worker.main, json.dumps(source).encode())
        self._connection: socket.socket | None = None

    async def render(self, variables: Mapping[str, Any]) -> str:
        """Return the prompt.  Raises ApiError if the template refuses the messages or fails."""
        data = json.dumps({**self._special_tokens, **variables}).encode()
        async with self._lock:
            found = await asyncio.to_thread(self._ask, data)
        is_rendered, text = found
        if not is_rendered:
            raise ApiError(f"messages: the chat template refuses them: {text}", "messages")
        return str(text)

    def close(self) -> None:
        """End the processes."""
        self._end()
        self._processes.close()

    def _end(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _ask(self, data: bytes) -> tuple[bool, str]:
        try:
            if self._connection is None:
                self._connection = self._processes.open()
                self._connection.settimeout(_PATIENCE_S)
                is_compiled, problem = json.loads(receive(self._connection))
                if not is_compiled:
                    self._end()
                    return False, str(problem)
            send(self._connection, data)
            is_rendered, text = json.loads(receive(self._connection))
            return bool(is_rendered), str(text)
        except TimeoutError:
            self.close()
            return False, f"its process has not answered for {_PATIENCE_S:g} s"
        except (EOFError, OSError):
            self._end()
            return False, exceeded()

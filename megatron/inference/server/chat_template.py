"""From chat messages to the text of a prompt, by the tokenizer's chat template."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

from megatron.inference.server import template_worker
from megatron.inference.server.errors import ApiError

_START_TIMEOUT_S = 60.0  # for a process that imports jinja2


class ChatTemplate:
    """A template, rendered by a process of its own that is replaced when it has to be ended."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._lock = asyncio.Lock()
        self._process: Any = None
        self._connection: Connection | None = None

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
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None

    def _ask(self, data: bytes) -> tuple[bool, str]:
        try:
            if self._process is None:
                problem = self._start()
                if problem:
                    self.close()
                    return False, problem
            assert self._connection is not None, "_start() sets it"
            self._connection.send_bytes(data)
            if not self._connection.poll(2 * template_worker.TIME_LIMIT_S):
                self.close()
                return False, "it does not end"
            is_rendered, text = json.loads(self._connection.recv_bytes())
            return bool(is_rendered), str(text)
        except (EOFError, OSError):
            self.close()
            return False, (
                f"it takes more than {template_worker.TIME_LIMIT_S:g} s, or too much memory"
            )

    def _start(self) -> str:
        """Start the process; return why the template does not compile, or nothing."""
        context = multiprocessing.get_context("spawn")
        self._connection, other = context.Pipe()
        self._process = context.Process(
            target=template_worker.serve, args=(other, self.source), daemon=True
        )
        self._process.start()
        other.close()
        if not self._connection.poll(_START_TIMEOUT_S):
            return "its process does not start"
        is_compiled, problem = json.loads(self._connection.recv_bytes())
        return "" if is_compiled else str(problem)

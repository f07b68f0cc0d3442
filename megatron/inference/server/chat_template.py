"""From chat messages to the text of a prompt, by the tokenizer's chat template."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

from megatron.core.config.errors import ConfigError
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


def read_chat_template(
    file: str | None, tokenizer_path: str | None
) -> tuple[str | None, dict[str, str]]:
    """Return the template's source, or None, and the texts of special tokens.

    ``file``: --chat-template.  Else the folder of the tokenizer has it: chat_template.jinja or
    ``chat_template`` in tokenizer_config.json.  Raises ConfigError for a file that cannot be read.
    """
    folder = tokenizer_path or ""
    if folder and not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    config = _tokenizer_config(folder) if folder else {}
    tokens = {
        name: text
        for name in ("bos_token", "eos_token", "pad_token", "unk_token")
        if (text := _content_of(config.get(name))) is not None
    }
    if file is not None:
        return _read(file, f"--chat-template {file}"), tokens
    jinja = os.path.join(folder, "chat_template.jinja")
    if folder and os.path.isfile(jinja):
        return _read(jinja, jinja), tokens
    found = config.get("chat_template")
    if isinstance(found, list):  # several, with names
        named = {t["name"]: t["template"] for t in found if isinstance(t, dict) and len(t) == 2}
        found = named.get("default")
    return (found if isinstance(found, str) else None), tokens


def _tokenizer_config(folder: str) -> dict[str, Any]:
    path = os.path.join(folder, "tokenizer_config.json")
    if not os.path.isfile(path):
        return {}
    try:
        found = json.loads(_read(path, path))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no JSON: {error}; fetch it again") from None
    return found if isinstance(found, dict) else {}


def _content_of(token: object) -> str | None:
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _read(path: str, flag: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{flag} cannot be read: {error}; give a file of jinja text") from None

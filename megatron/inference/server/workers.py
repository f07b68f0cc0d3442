"""Work for clients in processes with limits: chat templates, images and long texts.

No client is trusted, nor the template in a tokenizer's folder; and most tokenizers hold the GIL for
all of a text: in the front end, one long prompt would stop every other request.

Messages: to a template each object of variables; to a decoder of images the name, a zero byte and
the bytes of the file; to a tokenizer [method, items].  Answers are JSON
lists, whether it succeeded and the result or the reason; for an image a line of JSON,
[width, height, shape] with pixel values f32 after it, or the reason as a string.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np

from megatron.core.chat_templates import compile_template, template_errors
from megatron.core.config.errors import ConfigError, DataError
from megatron.core.datasets.images import ImageSettings, pillow
from megatron.core.limited_processes import (
    LimitedProcesses,
    Limits,
    ProcessFailed,
    Work,
    fork_for_each_connection,
    receive,
    send,
)
from megatron.inference.server.fields import ApiError
from megatron.training.process.user_code import problems_of_imports
from megatron.training.tokenizer import MegatronTokenizer, TokenizerSpec, create_tokenizer

_TIME_LIMIT_S = 10.0  # of the processor, for an image or the texts of one request
_MEMORY_LIMIT_BYTES = 2 << 30
_MAX_TEXT = 16 << 20  # characters of a rendered prompt
_WANTED_BY = "the server"
READ_ERRORS = (ValueError, KeyError)  # of tokenizers, for a text that they cannot read


class ChatTemplate:
    """From chat messages to the text of a prompt, by the tokenizer's chat template.

    One process renders it, in jinja2's sandbox; it is replaced when it has to be ended.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._lock = asyncio.Lock()
        self._processes = LimitedProcesses(render_templates, json.dumps(source).encode())
        self._connection: socket.socket | None = None

    async def render(self, variables: Mapping[str, Any]) -> str:
        """Return the prompt.  Raises ApiError if the template refuses the messages or fails."""
        data = json.dumps({**self._special_tokens, **variables}).encode()
        async with self._lock:
            is_rendered, text = await asyncio.to_thread(self._ask, data)
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

    def _ask(self, data: bytes) -> Any:
        """Return whether the template was rendered, and the text or why not."""
        try:
            with self._processes.failures():
                if self._connection is None:
                    self._connection = self._processes.open()
                send(self._connection, data)
                return json.loads(receive(self._connection))
        except ProcessFailed as error:
            self._end()
            return False, error


def _template_work(setup: bytes) -> Work:
    """Render a template, which is the setup, a JSON string."""
    source = json.loads(setup)
    errors = template_errors(_WANTED_BY)
    compile_template("", _WANTED_BY)  # imports the modules of templates

    def render(connection: socket.socket, limits: Limits) -> None:
        template = None
        while True:
            variables = json.loads(receive(connection))
            with limits.time():
                try:
                    # jinja2 computes constants when it compiles.
                    template = template or compile_template(source, _WANTED_BY)
                    text = template.render(**variables)
                    is_short = len(text) <= _MAX_TEXT
                    found = (is_short, text if is_short else "it is too long")
                except errors as error:
                    (reason, *_) = str(error).strip().splitlines() or [""]
                    found = (False, f"{type(error).__name__}: {reason[:500]}")
            send(connection, json.dumps(found).encode())

    return render


render_templates = partial(fork_for_each_connection, prepare=_template_work)


def _processes(prepare: Callable[[bytes], Work], setup: bytes) -> LimitedProcesses:
    main = partial(
        fork_for_each_connection,
        prepare=prepare,
        time_limit_s=_TIME_LIMIT_S,
        memory_limit_bytes=_MEMORY_LIMIT_BYTES,
    )
    return LimitedProcesses(main, setup)


class LimitedImageProcessor:
    """`ImageSettings` that read each image in a process of its own."""

    def __init__(self, settings: ImageSettings) -> None:
        self._processes = _processes(_image_work, json.dumps(asdict(settings)).encode())

    def read(self, data: bytes, name: str) -> tuple[np.ndarray, tuple[int, int]]:
        """Return pixels of an image file, and its width and height.  Raises DataError."""
        try:
            answer = self._processes.ask(name.encode() + b"\0" + data, _TIME_LIMIT_S)
        except ProcessFailed as error:
            raise DataError(f"{name}: no image that can be decoded: {error}") from None
        head, _, pixels = answer.partition(b"\n")
        found = json.loads(head)
        if isinstance(found, str):
            raise DataError(found)
        width, height, shape = found
        return np.frombuffer(bytearray(pixels), np.float32).reshape(shape), (width, height)


def _image_work(setup: bytes) -> Work:
    """Decode images as the setup, fields of `ImageSettings`, says."""
    found = json.loads(setup)
    found["resolutions"] = tuple(map(tuple, found["resolutions"]))
    settings = ImageSettings(**found)
    pillow().init()  # imports the decoders

    def decode(connection: socket.socket, limits: Limits) -> None:
        name, _, data = receive(connection).partition(b"\0")
        with limits.one_of_few(), limits.time():
            try:
                pixels, size = settings.read(data, name.decode())
                head = json.dumps([*size, pixels.shape])
                answer = head.encode() + b"\n" + pixels.tobytes()
            except DataError as error:
                answer = json.dumps(str(error)).encode()
        send(connection, answer)

    return decode


class LimitedTokenizer:
    """A tokenizer in processes of its own; ``modules``: user modules that may register some."""

    def __init__(self, spec: Mapping[str, Any], modules: Sequence[str]) -> None:
        self._processes = _processes(_tokenizer_work, json.dumps([spec, modules]).encode())

    def apply(self, kind: str, items: list[Any]) -> list[Any]:
        """Return the results of `apply_tokenizer`.  Raises ProcessFailed, ValueError."""
        answer = self._processes.ask(json.dumps([kind, items]).encode(), _TIME_LIMIT_S)
        is_done, found = json.loads(answer)
        if not is_done:
            raise ValueError(found)
        return list(found)

    def close(self) -> None:
        """End the processes."""
        self._processes.close()


def apply_tokenizer(tokenizer: MegatronTokenizer, kind: str, items: list[Any]) -> list[Any]:
    """Return ids of texts (``tokenize``, ``tokenize_plain``), or texts of ids (``detokenize``)."""
    function = getattr(tokenizer, kind)
    is_text = kind == "detokenize"
    return [function(item) if is_text else list(function(item)) for item in items]


def _tokenizer_work(setup: bytes) -> Work:
    """Tokenize with the tokenizer of the setup: fields of `TokenizerSpec`, and user modules."""
    spec, modules = json.loads(setup)
    ConfigError.raise_for(problems_of_imports(modules))
    tokenizer = create_tokenizer(TokenizerSpec(**spec))

    def work(connection: socket.socket, limits: Limits) -> None:
        kind, items = json.loads(receive(connection))
        with limits.time():
            try:
                found = [True, apply_tokenizer(tokenizer, kind, items)]
            except READ_ERRORS as error:
                found = [False, str(error)]
            answer = json.dumps(found).encode()
        send(connection, answer)

    return work

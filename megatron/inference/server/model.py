"""The model as the front end needs it: its tokenizer, template and images, and its limits.

Chat templates, images and long texts are work for clients, in processes with limits.
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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, lru_cache, partial
from typing import Any

import numpy as np

from megatron.core.chat_templates import compile_template, template_errors
from megatron.core.config.errors import ConfigError, DataError
from megatron.core.datasets.images import ImageSettings, pillow
from megatron.core.inference.sampling_params import SamplingParams
from megatron.core.limited_processes import (
    LimitedProcesses,
    Limits,
    ProcessFailed,
    Work,
    fork_for_each_connection,
    receive,
    send,
)
from megatron.inference.image_prompts import ImageInput, ImagePrompts
from megatron.inference.server.engine_link import EngineInfo
from megatron.inference.server.fields import ApiError
from megatron.training.process.user_code import problems_of_imports
from megatron.training.tokenizer import MegatronTokenizer, TokenizerSpec, create_tokenizer
from megatron.training.tokenizer.multimodal_tokenizer import MultimodalTokenizer

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


_LONG_TEXT = 2000  # characters or ids of a request; more are for another process
_AT_ONCE = 4  # processes that tokenize


@dataclass(frozen=True, eq=False)
class Model:
    """The served model."""

    info: EngineInfo
    tokenizer: MegatronTokenizer = field(repr=False)
    image_prompts: ImagePrompts | None = field(default=None, repr=False)

    @classmethod
    def of(cls, info: EngineInfo) -> Model:
        """Build the tokenizer of the engine's model."""
        tokenizer = create_tokenizer(TokenizerSpec(**info.tokenizer))
        if info.images is None:
            return cls(info, tokenizer)
        images = ImageInput.from_json(info.images)
        processor = LimitedImageProcessor(images.settings)
        return cls(info, tokenizer, ImagePrompts(images, tokenizer, processor.read))

    def decode(self, ids: list[int], *, hidden: frozenset[int] = frozenset()) -> str:
        """Return the text of ``ids``; ids of the vocabulary's padding and hidden ones have none."""
        shown = [i for i in ids if i not in hidden] if hidden else ids
        return self.tokenizer.detokenize(self._known(shown))

    def special_ids(self, kept: Iterable[str]) -> frozenset[int]:
        """Return the special tokens but those with the texts ``kept``."""
        return frozenset(self.tokenizer.special_ids()) - {*map(self.tokenizer.vocab.get, kept)}

    async def decode_all(self, rows: Sequence[list[int]]) -> list[str]:
        """Return the text of each of some lists of ids, which may be long."""
        return await self._apply("detokenize", [*map(self._known, rows)], "tokens")

    def _known(self, ids: list[int]) -> list[int]:
        """Return the ids that the tokenizer has."""
        known = self.tokenizer.vocab_size
        return ids if not ids or max(ids) < known else [i for i in ids if i < known]

    @lru_cache(maxsize=1 << 16)  # noqa: B019  (one model in a process)
    def token_text(self, token: int) -> str:
        """Return the text of one token."""
        return self.decode([token])

    def end_tokens(self, params: SamplingParams) -> frozenset[int]:
        """Return the tokens that end a text."""
        eod = () if params.ignore_eos or self.info.eod is None else (self.info.eod,)
        return frozenset((*eod, *params.stop_token_ids))

    async def tokenize(
        self, texts: Sequence[str], param: str = "prompt", *, is_plain: bool = False
    ) -> list[list[int]]:
        """Return the ids of each text; a plain one has no special tokens around it.

        Raises ApiError if the tokenizer cannot read one.
        """
        kind = "tokenize_plain" if is_plain else "tokenize"
        return await self._apply(kind, list(texts), param)

    def check_characters(self, text: str, param: str) -> None:
        """Raise ApiError for a prompt that is too long for any tokens."""
        if len(text) > self.most_characters:
            raise ApiError(
                f"{param}: a text has {len(text)} characters; {self.info.max_sequence_length} "
                f"tokens, this model's maximum context length, have {self.most_characters} at "
                "most: shorten it",
                param,
                code="context_length_exceeded",
            )

    @cached_property
    def most_characters(self) -> int:
        """Number of characters of a prompt, at most."""
        return self.info.max_sequence_length * self.longest_token

    @cached_property
    def longest_token(self) -> int:
        """Number of characters of the longest token, at least."""
        return max(map(len, self.tokenizer.vocab)) + 1  # and a blank, which is part of none

    async def _apply(self, kind: str, items: list[Any], param: str) -> list[Any]:
        """Call a method of the tokenizer for each item; long ones in another process."""
        size = sum(map(len, items))
        try:
            if size <= _LONG_TEXT:
                return apply_tokenizer(self.tokenizer, kind, items)
            async with self._places[size > self.most_characters]:
                return await asyncio.to_thread(self._elsewhere.apply, kind, items)
        except (*READ_ERRORS, ProcessFailed) as error:
            raise ApiError(f"{param}: the tokenizer cannot read it: {error}", param) from None

    @cached_property
    def _elsewhere(self) -> LimitedTokenizer:
        return LimitedTokenizer(self.info.tokenizer, self.info.modules)

    @cached_property
    def _places(self) -> tuple[asyncio.Semaphore, asyncio.Semaphore]:
        """Places for texts of prompts, and one for longer ones, for which prompts do not wait."""
        return asyncio.Semaphore(_AT_ONCE), asyncio.Semaphore(1)

    def close(self) -> None:
        """End the processes."""
        self._elsewhere.close()

    def special_text(self, role: str) -> str | None:
        """Return the text of a special token; None if the tokenizer does not read it as one."""
        token = self.tokenizer.id_of(role)
        text = None if token is None else self.tokenizer.inv_vocab.get(token)
        try:
            return text if text and self.tokenizer.tokenize_plain(text) == [token] else None
        except READ_ERRORS:  # NullTokenizer reads numbers only
            return None

    def turns(self, messages: list[dict[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """Return messages for a chat template, with the additions of the prompt format.

        Raises ApiError if the format cannot render them.
        """
        if not isinstance(self.tokenizer, MultimodalTokenizer):
            return messages
        try:
            return self.tokenizer.turns(messages)
        except DataError as error:
            raise ApiError(f"messages: {error}", "messages") from None

    @cached_property
    def newlines_after_colons(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The tokens whose text ends with a colon, and those that begin a line."""
        known = min(self.info.vocab_size, self.tokenizer.vocab_size)
        texts = [self.decode([token]) for token in range(known)]
        return (
            tuple(token for token, text in enumerate(texts) if text.endswith(":")),
            tuple(token for token, text in enumerate(texts) if text.startswith("\n")),
        )

    def with_one_bos(self, ids: Sequence[int]) -> list[int]:
        """Return ``ids`` without a BOS of the tokenizer before the BOS of a chat template."""
        bos = self.tokenizer.id_of("bos")
        return list(ids[1:] if bos is not None and list(ids[:2]) == [bos, bos] else ids)

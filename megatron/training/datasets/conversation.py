"""Conversations of fine-tuning data: rows of jsonl, parquet and `datasets` folders.

A row has ``messages`` (and ``tools``), or ``prompt`` and ``completion``: two texts, which no
template changes, or two lists of messages, of which only the second is trained.
"""

from __future__ import annotations

import bisect
import glob
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, TypeVar

import numpy as np

from megatron.core.config.errors import DataError
from megatron.core.optional import require
from megatron.training.tokenizer.base import MegatronTokenizer
from megatron.training.tokenizer.chat import ChatTemplate, EncodedChat, Message, Span, encode_text

T = TypeVar("T")
ROLES = ("system", "developer", "user", "assistant", "tool")
_BEFORE = {  # role -> roles that may precede it; None: the beginning
    "system": (None,),
    "developer": (None, "system"),
    "user": (None, "system", "developer", "user", "assistant", "tool"),
    "assistant": ("user", "tool"),
    "tool": ("assistant", "tool"),
}
_BLOCK = 1 << 24  # bytes of a jsonl file that one read searches for line ends


@dataclass(frozen=True)
class Conversation:
    """Messages, and functions that the assistant may call.

    Messages before ``first_trained`` carry no loss.  ``is_text``: the contents are joined as they
    are; the end-of-document token follows.
    """

    messages: tuple[Message, ...]
    tools: tuple[Any, ...] | None = None
    first_trained: int = 0
    is_text: bool = False


class Rows(Protocol):
    """Rows of files, read when they are used."""

    def __len__(self) -> int: ...
    def __getitem__(self, i: int) -> Mapping[str, Any]: ...
    def where(self, i: int) -> str:
        """Return file and line of a row, for error messages."""

    def versions(self) -> list[tuple[str, int, int]]:
        """Return path, size and time of change in ns of each file."""


def open_rows(path: str) -> Rows:
    """Return the rows of a jsonl or parquet file, or of a folder with such or Arrow files.

    A folder that `datasets.save_to_disk` wrote lists its files in state.json.  Raises DataError.
    """
    if not os.path.isdir(path):
        return _open_file(path)
    state = os.path.join(path, "state.json")
    if os.path.isfile(state):
        with open(state, encoding="utf-8") as file:
            names = [entry["filename"] for entry in json.load(file)["_data_files"]]
        files = [os.path.join(path, os.path.basename(name)) for name in names]
    else:
        found = glob.iglob(os.path.join(glob.escape(path), "*"))
        files = sorted(f for f in found if os.path.splitext(f)[1] in _READERS)
    if not files:
        raise DataError(
            f"{path} has no {', '.join(_READERS)} file; give a file, or the folder of one split"
        )
    return files_as_one(files)


def files_as_one(files: Sequence[str]) -> Rows:
    """Return the rows of several files, in order."""
    parts = [_open_file(file) for file in files]
    return parts[0] if len(parts) == 1 else _JoinedRows(parts)


def read_row(rows: Rows, i: int, of_row: Callable[[Mapping[str, Any]], T]) -> T:
    """Return what ``of_row`` finds in row ``i``.  Raises DataError with file and line."""
    try:
        return of_row(rows[i])
    except DataError as error:
        where = rows.where(i)
        known = str(error)
        raise DataError(known if known.startswith(where) else f"{where}: {known}") from None


def read_conversation(rows: Rows, i: int) -> Conversation:
    """Return the conversation in row ``i``, checked.  Raises DataError with file and line."""
    return read_row(rows, i, conversation_of)


def conversation_of(row: Mapping[str, Any]) -> Conversation:
    """Return the conversation of a row, checked.  Raises DataError."""
    tools = tools_of(row)
    if "messages" in row:
        messages = messages_of(row["messages"], "messages")
        check_turns(messages)
        return Conversation(messages, tools)
    prompt = row.get("prompt")
    completion = row.get("completion")
    if isinstance(prompt, str) and isinstance(completion, str):
        if not completion:
            raise DataError("completion is empty; write the text that the model learns")
        turns = ({"role": "user", "content": prompt}, {"role": "assistant", "content": completion})
        return Conversation(turns, is_text=True)
    if prompt is None or completion is None:
        raise DataError(
            f"a row needs messages, or prompt and completion; this one has {', '.join(row)}"
        )
    asked = messages_of(prompt, "prompt")
    messages = asked + messages_of(completion, "completion")
    check_turns(messages)
    return Conversation(messages, tools, first_trained=len(asked))


def encode_conversation(
    conversation: Conversation, tokenizer: MegatronTokenizer, chat: ChatTemplate | None
) -> EncodedChat:
    """Return the tokens and the mask of a conversation.  ``chat`` may be None for plain texts."""
    messages = conversation.messages
    if not conversation.is_text:
        assert chat is not None, "messages need a chat template"
        return chat.encode(messages, conversation.tools, first_trained=conversation.first_trained)
    prompt, completion = (message["content"] for message in messages)
    text = prompt + completion
    encoded = encode_text(tokenizer, text, [Span(len(prompt), len(text))], adds_special=True)
    if encoded.tokens[-1:].tolist() == [tokenizer.eod]:  # the tokenizer's files add it
        return EncodedChat(encoded.tokens, np.append(encoded.is_trained[:-1], True))
    tokens = np.append(encoded.tokens, np.int32(tokenizer.eod))
    return EncodedChat(tokens, np.append(encoded.is_trained, True))


def messages_of(found: object, name: str) -> tuple[Message, ...]:
    """Return the messages of field ``name`` of a row, without keys that have no value."""
    if isinstance(found, np.ndarray):
        found = found.tolist()
    if not isinstance(found, list) or not found:
        raise DataError(f"{name} is {found!r:.60}; it must be a list of messages")
    messages = []
    for i, message in enumerate(found):
        if not isinstance(message, Mapping) or message.get("role") not in ROLES:
            raise DataError(
                f"message {i} is {message!r:.100}; it needs a role of {', '.join(ROLES)}"
            )
        # Tables have every key in every row.
        filled = {key: value for key, value in message.items() if value is not None}
        content = filled.setdefault("content", None)
        if content is None and not filled.get("tool_calls"):
            raise DataError(f"message {i} ({message['role']}) has no content")
        if content is not None and not isinstance(content, str):
            raise DataError(f"the content of message {i} is {content!r:.60}; it must be a text")
        messages.append(filled)
    return tuple(messages)


def tools_of(row: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """Return the tools of a row, which tables hold as JSON text; None without any."""
    tools = row.get("tools")
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise DataError(f"tools is no JSON: {error}") from None
    if tools and not isinstance(tools, list):
        raise DataError(f"tools is {tools!r:.60}; it must be a list of functions")
    return tuple(tools) if tools else None


def check_turns(messages: Sequence[Message]) -> None:
    """Check the order of roles, and that no assistant's turn is empty.  Raises DataError."""
    before = None
    for i, message in enumerate(messages):
        role = message["role"]
        if before not in _BEFORE[role]:
            raise DataError(
                f"message {i} ({role}) follows {before or 'nothing'}; roles are in the order "
                "system, user, assistant, user, assistant, ..., tool after assistant"
            )
        says = (message["content"] or "").strip() or message.get("reasoning_content")
        if role == "assistant" and not says and not message.get("tool_calls"):
            raise DataError(f"message {i} (assistant) is empty; remove it, or the conversation")
        before = role
    if before != "assistant":
        raise DataError(f"the last message is of the {before}; an assistant's answer must follow")


def _version(path: str) -> tuple[str, int, int]:
    status = os.stat(path)
    return path, status.st_size, status.st_mtime_ns


def _open_file(path: str) -> Rows:
    if not os.path.isfile(path):
        raise DataError(f"{path} does not exist; give a jsonl or parquet file, or a folder of them")
    extension = os.path.splitext(path)[1]
    if extension not in _READERS:
        raise DataError(f"{path} is no {', '.join(_READERS)} file; write one row per line as JSON")
    return _READERS[extension](path)


class _JsonLines:
    """Lines of a jsonl file; empty ones are no rows."""

    def __init__(self, path: str) -> None:
        self._path = path

    @cached_property
    def _lines(self) -> tuple[np.ndarray, np.ndarray]:
        """Offset of each row's line in the file, with the end; and its number."""
        ends = [np.zeros(1, np.int64)]
        size = 0
        with open(self._path, "rb") as file:
            while block := file.read(_BLOCK):
                ends.append(np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n")) + size + 1)
                size += len(block)
        stops = np.concatenate(ends)
        if stops[-1] != size:
            stops = np.append(stops, size)
        numbers = np.flatnonzero(np.diff(stops) > 1)  # a lone line end is no row
        return stops, numbers

    def __len__(self) -> int:
        return len(self._lines[1])

    def __getitem__(self, i: int) -> Mapping[str, Any]:
        stops, numbers = self._lines
        start, end = stops[numbers[i] : numbers[i] + 2].tolist()
        with open(self._path, "rb") as file:
            file.seek(start)
            line = file.read(end - start)
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            reason = getattr(error, "msg", error)  # without the line number of the parser: 1
            column = f" at character {error.pos + 1}" if hasattr(error, "pos") else ""
            raise DataError(f"{self.where(i)}: it is no JSON: {reason}{column}") from None
        if not isinstance(row, dict):
            raise DataError(f"{self.where(i)}: it is a {type(row).__name__}, not an object")
        return row

    def where(self, i: int) -> str:
        """Return file and line."""
        return f"{self._path}, line {self._lines[1][i] + 1}"

    def versions(self) -> list[tuple[str, int, int]]:
        """Return path, size and time of change."""
        return [_version(self._path)]


class _Table:
    """Rows of a parquet or Arrow file, whose columns stay in the memory map if they can."""

    def __init__(self, path: str) -> None:
        self._path = path

    @cached_property
    def _table(self) -> Any:
        pyarrow = require("pyarrow", self._path)
        try:
            if self._path.endswith(".parquet"):
                return require("pyarrow.parquet", self._path).read_table(self._path)
            source = pyarrow.memory_map(self._path)
            return require("pyarrow.ipc", self._path).open_stream(source).read_all()
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(f"{self._path} cannot be read: {error}; write it again") from None

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, i: int) -> Mapping[str, Any]:
        row: Mapping[str, Any] = self._table.slice(i, 1).to_pylist()[0]
        return {key: value for key, value in row.items() if value is not None}

    def where(self, i: int) -> str:
        """Return file and row."""
        return f"{self._path}, row {i + 1}"

    def versions(self) -> list[tuple[str, int, int]]:
        """Return path, size and time of change."""
        return [_version(self._path)]


class _JoinedRows:
    """Rows of several files, in order."""

    def __init__(self, parts: Sequence[Rows]) -> None:
        self._parts = parts
        self._ends = np.cumsum([len(part) for part in parts]).tolist()

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, i: int) -> Mapping[str, Any]:
        part, at = self._place(i)
        return part[at]

    def where(self, i: int) -> str:
        """Return file and line."""
        part, at = self._place(i)
        return part.where(at)

    def versions(self) -> list[tuple[str, int, int]]:
        """Return path, size and time of change of each file."""
        return [version for part in self._parts for version in part.versions()]

    def _place(self, i: int) -> tuple[Rows, int]:
        part = bisect.bisect_right(self._ends, i)
        return self._parts[part], i - (self._ends[part - 1] if part else 0)


_READERS: Mapping[str, Callable[[str], Rows]] = {
    ".jsonl": _JsonLines,
    ".json": _JsonLines,
    ".parquet": _Table,
    ".arrow": _Table,
}

"""Rows of training data in files, and the conversations in them.

Files are jsonl, JSON arrays, parquet and `datasets` folders.  Rows are objects; messages name the
file and the line, element or row.

A row of text has ``messages`` (and ``tools``), or ``prompt`` and ``completion``: two texts, which
no template changes, or two lists of messages, of which only the second is trained.  Rows of
ShareGPT have ``conversations``, whose messages have ``from`` and ``value``.  Rows of Alpaca have
``instruction``, ``input`` and ``output``; each stands for a prompt and a completion.

The text of a sample with images has turns: a turn is a dict with role (system, user, assistant)
and content; ``<image>`` in a content stands for the next image of the sample.
"""

from __future__ import annotations

import bisect
import glob
import gzip
import io
import json
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, BinaryIO, Protocol, TypeVar

import numpy as np

from megatron.core.config.errors import DataError
from megatron.core.optional import require
from megatron.core.process_memory import free_for_job

T = TypeVar("T")
_BLOCK = 1 << 24  # bytes of a jsonl file that one read searches for line ends
_SHOWN = 10  # rows that an error message lists
_SHORT = 16  # bytes of a line: one that is shorter may be blank
_COMPRESSED = ".gz"
_SHARE_OF_MEMORY = 4  # decompressed rows may take 1/4 of the free memory: a copy is made
_GZIP = b"\x1f\x8b"
_JSON_NAMES = {dict: "an object", list: "a list", str: "a text", bool: "a boolean"}


class Rows(Protocol):
    """Rows of files, read when they are used."""

    def __len__(self) -> int: ...
    def __getitem__(self, i: int) -> Mapping[str, Any]: ...
    def where(self, i: int) -> str:
        """Return file and line of a row, for error messages."""

    def versions(self) -> list[tuple[str, int, int]]:
        """Return path, size and time of change in ns of each file."""


def open_rows(path: str) -> Rows:
    """Return the rows of a file, or of a folder with such files.

    A folder that `datasets.save_to_disk` wrote lists its files in state.json.  Raises DataError.
    """
    if not os.path.isdir(path):
        return _open_file(path)
    state = os.path.join(path, "state.json")
    if os.path.isfile(state):
        files = [os.path.join(path, os.path.basename(name)) for name in _files_in(state)]
    else:
        found = glob.iglob(os.path.join(glob.escape(path), "*"))
        files = sorted(f for f in found if _extension(f) in _READERS)
    if not files:
        splits = os.path.join(path, "dataset_dict.json")
        hint = "the folder of one split" if os.path.isfile(splits) else "or the folder of one split"
        raise DataError(f"{path} has no {', '.join(_READERS)} file; give a file, {hint}")
    return join_files(files)


def _files_in(state: str) -> list[str]:
    """Return the files that state.json of a folder of `datasets` lists.  Raises DataError."""
    with open(state, "rb") as file:
        content = _parse_json(file.read(), state, "save the dataset again")
    try:
        names: list[str] = [entry["filename"] for entry in content["_data_files"]]
    except (KeyError, TypeError):
        names = [""]
    if not all(isinstance(name, str) and name for name in names):
        raise DataError(f"{state} has no list _data_files of files: save the dataset again")
    return names


def join_files(files: Sequence[str]) -> Rows:
    """Return the rows of several files, in order."""
    parts = [_open_file(file) for file in files]
    return parts[0] if len(parts) == 1 else _JoinedRows(parts)


def read_row(rows: Rows, i: int, of_row: Callable[[Mapping[str, Any]], T]) -> T:
    """Return the result of ``of_row`` for row ``i``.  Raises DataError with file and line."""
    try:
        return of_row(rows[i])
    except DataError as error:
        where = rows.where(i)
        known = str(error)
        raise DataError(known if known.startswith(where) else f"{where}: {known}") from None


def read_all(rows: Rows, of_row: Callable[[Mapping[str, Any]], T], unit: str) -> list[T]:
    """Return the results of ``of_row`` for all rows, which are ``unit``.

    Raises DataError that lists the rows for which ``of_row`` raises one.
    """
    found: list[T] = []
    problems: list[str] = []
    for i in range(len(rows)):
        try:
            found.append(read_row(rows, i, of_row))
        except DataError as error:
            problems.append(str(error))
    if problems:
        more = len(problems) - _SHOWN
        lines = "\n".join(problems[:_SHOWN]) + (f"\nand {more} more" if more > 0 else "")
        raise DataError(f"{len(problems)} of {len(rows)} {unit} are wrong:\n{lines}")
    return found


def keys_of(row: Mapping[str, Any]) -> str:
    """Return the keys of a row that have values, for error messages."""
    return ", ".join(key for key, value in row.items() if value is not None) or "nothing"


def _open_file(path: str) -> Rows:
    if not os.path.isfile(path):
        raise DataError(f"{path} does not exist; give a jsonl or parquet file, or a folder of them")
    extension = _extension(path)
    if extension not in _READERS:
        raise DataError(f"{path} is no {', '.join(_READERS)} file; write one row per line as JSON")
    return _READERS[extension](path)


def _extension(path: str) -> str:
    return os.path.splitext(path.removesuffix(_COMPRESSED))[1]


def _open_json(path: str) -> Rows:
    """Return the rows of a file of JSON: a list of objects, or one object per line."""
    data = _decompress(path) if path.endswith(_COMPRESSED) else None
    with open(path, "rb") as file:
        head = file.read(_BLOCK) if data is None else data[:_BLOCK]
    if head.startswith(_GZIP):
        raise DataError(f"{path} is compressed by gzip; give it a name that ends in {_COMPRESSED}")
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise DataError(f"{path} is UTF-16 text; save it as UTF-8")
    is_list = head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"["
    return _JsonList(path, data) if is_list else _JsonLines(path, data)


def _decompress(path: str) -> bytes:
    free = free_for_job()
    found = bytearray()
    try:
        with gzip.open(path) as file:
            while block := file.read(_BLOCK):
                found += block
                if len(found) > free // _SHARE_OF_MEMORY:
                    raise DataError(
                        f"{path} has more than {len(found)} bytes when decompressed, which takes "
                        f"too much of the {free} bytes of free memory: decompress the file"
                    )
            return bytes(found)
    except DataError:  # no damage
        raise
    except MemoryError:
        raise DataError(
            f"{path} does not fit into memory when decompressed: decompress the file"
        ) from None
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be decompressed: {error}; copy it again") from None


class _File:
    """A file that is complete."""

    def __init__(self, path: str) -> None:
        self._path = path

    def versions(self) -> list[tuple[str, int, int]]:
        """Return path, size and time of change."""
        status = os.stat(self._path)
        return [(self._path, status.st_size, status.st_mtime_ns)]


class _JsonLines(_File):
    """Lines of a jsonl file; blank ones are skipped.  ``data``: its bytes, if compressed."""

    def __init__(self, path: str, data: bytes | None) -> None:
        super().__init__(path)
        self._data = data

    @cached_property
    def _lines(self) -> np.ndarray:
        """Number of each row's line, and where it begins and ends in the file [rows, 3]."""
        found = []
        size = number = last = 0
        while block := self._bytes(size, size + _BLOCK):
            ends = np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n")) + size + 1
            size += len(block)
            found.append(_find_long_lines(number, last, ends))
            number += len(ends)
            last = int(ends[-1]) if len(ends) else last
        found.append(_find_long_lines(number, last, np.arange(size, size + (last < size))))
        lines = np.concatenate(found)
        short = np.flatnonzero(lines[:, 2] - lines[:, 1] < _SHORT)
        if not len(short):
            return lines
        with self._opened() as file:
            places = zip(short.tolist(), lines[short, 1:].tolist(), strict=True)
            blank = [i for i, (start, end) in places if not _read(file, start, end).strip()]
        return np.delete(lines, blank, axis=0)

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, i: int) -> Mapping[str, Any]:
        line = self._bytes(*self._lines[i, 1:].tolist())
        return _check_row(
            _parse_json(line, self.where(i), "write one object per line"), self.where(i)
        )

    def where(self, i: int) -> str:
        """Return file and line."""
        return f"{self._path}, line {self._lines[i, 0] + 1}"

    def _bytes(self, start: int, end: int) -> bytes:
        if self._data is not None:
            return self._data[start:end]
        with self._opened() as file:
            return _read(file, start, end)

    def _opened(self) -> BinaryIO:
        return open(self._path, "rb") if self._data is None else io.BytesIO(self._data)


def _read(file: BinaryIO, start: int, end: int) -> bytes:
    file.seek(start)
    return file.read(end - start)


def _find_long_lines(number: int, start: int, ends: np.ndarray) -> np.ndarray:
    """Return number, start and end of each line with text: empty lines may be very many.

    The first line has ``number`` and ``start``.
    """
    starts = np.concatenate([[start], ends[:-1]]) if len(ends) else ends
    lines: np.ndarray = np.stack([number + np.arange(len(ends)), starts, ends], axis=1)
    kept: np.ndarray = lines[ends - starts > 1]
    return kept


class _JsonList(_File):
    """Elements of a file that is one JSON list, in host memory.  ``data``: see `_JsonLines`."""

    def __init__(self, path: str, data: bytes | None) -> None:
        super().__init__(path)
        self._data = data

    @cached_property
    def _rows(self) -> list[Any]:
        data = self._data
        self._data = None
        if data is None:
            with open(self._path, "rb") as file:
                data = file.read()
        fix = "write one list of objects, or one object per line"
        rows: list[Any] = _parse_json(data, self._path, fix)
        return rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, i: int) -> Mapping[str, Any]:
        return _check_row(self._rows[i], self.where(i))

    def where(self, i: int) -> str:
        """Return file and element."""
        return f"{self._path}, element {i + 1}"


def _parse_json(data: bytes, where: str, fix: str) -> Any:
    """Return the value of JSON text.  Raises DataError."""
    try:
        value = json.loads(data.decode("utf-8-sig"))
        if b"\\ud" in data.lower():  # half a pair of surrogates is not a character
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        byte = f"byte 0x{data[error.start]:02x} at position {error.start + 1}"
        raise DataError(f"{where}: it is no UTF-8 text: {byte}; save it as UTF-8") from None
    except MemoryError:
        raise DataError(f"{where}: it does not fit into memory; {fix}") from None
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise DataError(f"{where}: {half} is half a character; remove it") from None
    except (ValueError, RecursionError) as error:
        reason = getattr(error, "msg", error)  # without the line number of the parser: 1
        raise DataError(f"{where}: it is no JSON: {reason}{_column(error)}; {fix}") from None
    return value


def _column(error: Exception) -> str:
    """Return the place in a text where JSON ends."""
    if not isinstance(error, json.JSONDecodeError):
        return ""
    if "\n" not in error.doc.rstrip():
        return f" at character {error.pos + 1}"
    return f" at character {error.colno} of line {error.lineno}"


def _check_row(row: object, where: str) -> Mapping[str, Any]:
    """Return an object.  Raises DataError for other values."""
    if isinstance(row, dict):
        return row
    name = "null" if row is None else _JSON_NAMES.get(type(row), "a number")
    raise DataError(f"{where}: it is {name}, not an object")


class _Table(_File):
    """Rows of a parquet or Arrow file, whose columns stay in the memory map if they can."""

    @cached_property
    def _table(self) -> Any:
        pyarrow = require("pyarrow", self._path)
        try:
            if self._path.endswith(".parquet"):
                return require("pyarrow.parquet", self._path).read_table(self._path)
            source = pyarrow.memory_map(self._path)
            table = require("pyarrow.ipc", self._path).open_stream(source).read_all()
            table.validate(full=True)  # offsets beyond the file would end the process
            return table
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(f"{self._path} cannot be read: {error}; write it again") from None

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, i: int) -> Mapping[str, Any]:
        try:
            row: Mapping[str, Any] = self._table.slice(i, 1).to_pylist()[0]
        except UnicodeDecodeError as error:
            raise DataError(f"{self.where(i)}: a text is no UTF-8: {error}") from None
        except (ArithmeticError, LookupError, ValueError) as error:  # a date in the year 10**9
            raise DataError(
                f"{self.where(i)}: a value has no meaning: {error}; correct it"
            ) from None
        return {key: value for key, value in row.items() if value is not None}

    def where(self, i: int) -> str:
        """Return file and row."""
        return f"{self._path}, row {i + 1}"


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
    ".jsonl": _open_json,
    ".json": _open_json,
    ".parquet": _Table,
    ".arrow": _Table,
}


Message = Mapping[str, Any]  # role, content, and tool_calls or reasoning_content of an assistant
ROLES = ("system", "developer", "user", "assistant", "tool")
_BEFORE = {  # role -> roles that may precede it; None: the beginning
    "system": (None,),
    "developer": (None, "system"),
    "user": (None, "system", "developer", "user", "assistant", "tool"),
    "assistant": ("user", "tool"),
    "tool": ("assistant", "tool"),
}
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant"}
IMAGE_TOKEN = "<image>"
_ROLES_OF_TURNS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
}
_LISTS = ("conversations", "texts", "messages")
_CAPTIONS = ("caption", "text")


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


def conversation_of(row: Mapping[str, Any]) -> Conversation:
    """Return the conversation of a row, checked.  Raises DataError."""
    for name in ("messages", "conversations"):
        if row.get(name) is not None:
            is_own = name == "messages"
            messages = messages_of(row[name], name) if is_own else sharegpt_messages(row)
            check_turns(messages)
            return Conversation(messages, tools_of(row))
    row = from_alpaca(row) or row
    if row.get("prompt") is None or row.get("completion") is None:
        raise DataError(
            "a row needs messages, conversations, prompt and completion, or instruction and "
            f"output; this one has {keys_of(row)}"
        )
    return answered_prompt(row, row["prompt"], "completion")


def from_alpaca(row: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the prompt and the completion that a row of Alpaca stands for; None for other rows.

    The user says the instruction and, after a blank line, the input.  Raises DataError.
    """
    if row.get("instruction") is None or row.get("output") is None or "prompt" in row:
        return None
    if row.get("history"):
        raise DataError("history is not empty: write the turns of this row as messages")
    parts = {name: row.get(name) or "" for name in ("system", "instruction", "input", "output")}
    for name, value in parts.items():
        if not isinstance(value, str):
            raise DataError(f"{name} is {value!r:.60}; it must be a text")
    asked = "\n\n".join(filter(None, (parts["instruction"], parts["input"])))
    system = [{"role": "system", "content": parts["system"]}] if parts["system"] else []
    return {
        "prompt": [*system, {"role": "user", "content": asked}],
        "completion": [{"role": "assistant", "content": parts["output"]}],
    }


def answered_prompt(row: Mapping[str, Any], prompt: object, name: str) -> Conversation:
    """Return a prompt with the answer in field ``name`` of ``row``; the answer alone is trained.

    Both are texts or both are lists of messages.  Raises DataError.
    """
    answer = row[name]
    if isinstance(prompt, str) and isinstance(answer, str):
        if not answer:
            raise DataError(f"{name} is empty; write the text that the model learns")
        turns = ({"role": "user", "content": prompt}, {"role": "assistant", "content": answer})
        return Conversation(turns, is_text=True)
    for key, value in (("prompt", prompt), (name, answer)):
        if isinstance(value, str):
            raise DataError(
                f"{key} is {value!r:.60}; it must be a list of messages, or the other field a text"
            )
    asked = messages_of(prompt, "prompt")
    messages = asked + messages_of(answer, name)
    check_turns(messages)
    return Conversation(messages, tools_of(row), first_trained=len(asked))


def messages_of(found: object, name: str) -> tuple[Message, ...]:
    """Return the messages of field ``name`` of a row, without keys that have no value.

    Those of ShareGPT get the keys role and content; texts in parts are joined.
    """
    if isinstance(found, np.ndarray):
        found = found.tolist()
    if not isinstance(found, list) or not found:
        raise DataError(f"{name} is {found!r:.60}; it must be a list of messages")
    return tuple(_message(i, message) for i, message in enumerate(found))


def sharegpt_messages(row: Mapping[str, Any]) -> tuple[Message, ...]:
    """Return the messages of ``conversations``, and before them the text of field ``system``."""
    messages = messages_of(row["conversations"], "conversations")
    text = row.get("system")
    if not text or messages[0]["role"] == "system":
        return messages
    return (_message(0, {"role": "system", "content": text}), *messages)


def _message(i: int, message: object) -> Message:
    """Return message ``i``, checked.  Raises DataError."""
    if isinstance(message, Mapping) and "role" not in message and "from" in message:
        role = message["from"]
        known = _SHAREGPT_ROLES.get(role, role) if isinstance(role, str) else role
        rest = {key: value for key, value in message.items() if key not in ("from", "value")}
        message = {"role": known, "content": message.get("value"), **rest}
    if not isinstance(message, Mapping) or message.get("role") not in ROLES:
        raise DataError(f"message {i} is {message!r:.100}; it needs a role of {', '.join(ROLES)}")
    # Tables have every key in every row.
    filled = {key: value for key, value in message.items() if value is not None}
    content = filled.setdefault("content", None)
    if isinstance(content, list):
        content = filled["content"] = _join_texts(i, content)
    if content is None and not filled.get("tool_calls"):
        raise DataError(f"message {i} ({message['role']}) has no content")
    for key in ("content", "reasoning_content"):
        if filled.get(key) is not None and not isinstance(filled[key], str):
            raise DataError(f"the {key} of message {i} is {filled[key]!r:.60}; it must be a text")
    _check_calls(i, filled.get("tool_calls"))
    return filled


def _join_texts(i: int, parts: Sequence[Any]) -> str:
    """Return the text of a content of parts, {"type": "text", "text": ...}.  Raises DataError."""
    for part in parts:
        is_text = isinstance(part, Mapping) and part.get("type", "text") == "text"
        if not is_text or not isinstance(part.get("text"), str):
            raise DataError(
                f"a part of message {i} is {part!r:.60}; parts must be texts "
                '({"type": "text", "text": ...}); pretrain_vlm.py trains on images'
            )
    return "".join(part["text"] for part in parts)


def _check_calls(i: int, calls: Any) -> None:
    """Check the calls of functions of message ``i``.  Raises DataError."""
    listed = calls if isinstance(calls, list) else [calls] if calls else []
    for call in listed:
        is_call = isinstance(call, Mapping) and listed is calls
        function = call.get("function", call) if is_call else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise DataError(
                f"a call in message {i} is {call!r:.60}; tool_calls must be a list of "
                '{"function": {"name": ..., "arguments": ...}}'
            )


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


def parse_record(data: bytes) -> Mapping[str, Any]:
    """Return the JSON object of a sample; raise DataError if it is none."""
    try:
        record = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DataError(f"its .json is no JSON ({error})") from error
    if not isinstance(record, dict):
        raise DataError(f"its .json is a {type(record).__name__}, not an object")
    return record


def turns_of(
    record: Mapping[str, Any], num_images: int, caption_prompt: str
) -> list[dict[str, str]]:
    """Return the turns of a record with conversations, texts, messages, caption or text.

    A caption is the answer to all images and ``caption_prompt``.  Raises DataError for other
    records.
    """
    for name in _LISTS:
        if name in record:
            return _turns(name, record[name])
    for name in _CAPTIONS:
        if name in record:
            caption = record[name]
            if not isinstance(caption, str) or not caption.strip():
                raise DataError(f"its {name} is {caption!r:.60}, not a text")
            return caption_turns(caption, num_images, caption_prompt)
    known = ", ".join((*_LISTS, *_CAPTIONS))
    raise DataError(f"its .json has the keys {sorted(record)!r:.100}, and none of {known}")


def caption_turns(caption: str, num_images: int, prompt: str) -> list[dict[str, str]]:
    """Return the turns that ask for a caption, or for nothing without an image."""
    answer = {"role": "assistant", "content": caption}
    if not num_images:
        return [answer]
    asked = "\n".join([IMAGE_TOKEN] * num_images + [prompt] * bool(prompt))
    return [{"role": "user", "content": asked}, answer]


def _turns(name: str, turns: Any) -> list[dict[str, str]]:
    if not isinstance(turns, list) or not turns:
        raise DataError(f"its {name} is {turns!r:.60}, not a list of turns")
    found: list[dict[str, str]] = []
    for turn in turns:
        if not isinstance(turn, dict):
            raise DataError(f"a turn of its {name} is {turn!r:.60}, not an object")
        if set(turn) >= {"user", "assistant"}:  # question and answer in one
            found += [_turn(role, turn[role]) for role in ("user", "assistant")]
        elif "from" in turn:
            found.append(_turn(turn["from"], turn.get("value")))
        else:
            found.append(_turn(turn.get("role"), turn.get("content")))
    return found


def _turn(role: Any, content: Any) -> dict[str, str]:
    known = _ROLES_OF_TURNS.get(role) if isinstance(role, str) else None
    if known is None:
        raise DataError(f"a turn is by {role!r:.40}; known are {', '.join(_ROLES_OF_TURNS)}")
    if isinstance(content, list):
        content = _join_texts_and_images(content)
    if not isinstance(content, str):
        raise DataError(f"a turn of the {known} is {content!r:.60}, not a text")
    return {"role": known, "content": content}


def _join_texts_and_images(parts: Sequence[Any]) -> str:
    """Return the text of a content of parts: {"type": "image"} and {"type": "text", ...}."""
    texts = []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "image":
            texts.append(IMAGE_TOKEN)
        elif kind == "text" and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            raise DataError(f"a part of a turn is {part!r:.60}, neither text nor image")
    return "".join(texts)

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO, NamedTuple, TypeVar

import numpy as np

from megatron.core.config.errors import DataError
from megatron.core.optional import require
from megatron.core.process_memory import free_for_job
from megatron.core.progress import Progress

T = TypeVar("T")
# Name of a form of rows -> the fields that it has.
_FORMS = {
    "messages": ("messages",),
    "ShareGPT": ("conversations",),
    "pairs of answers": ("chosen", "rejected"),
    "prompt and completion": ("prompt", "completion"),
    "Alpaca": ("instruction", "output"),
}
_BLOCK = 1 << 24  # bytes that one read decompresses
_SHOWN = 10  # rows that an error message lists
_COMPRESSED = ".gz"
_SHARE_OF_MEMORY = 4  # decompressed rows may take 1/4 of the free memory: a copy is made


class _Part(NamedTuple):
    """Rows of one file: the number of each row's line or element, and a function that reads it."""

    path: str
    unit: str
    numbers: Sequence[int] | np.ndarray  # from 0
    read: Callable[[int], object]  # raises DataError


class Rows:
    """Rows of files in order, read when they are used."""

    def __init__(self, parts: Sequence[_Part]) -> None:
        self._parts = parts
        self._ends = np.cumsum([len(part.numbers) for part in parts]).tolist()

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, i: int) -> Mapping[str, Any]:
        part, at = self._place(i)
        with error_at(self.where(i)):
            return _check_object(part.read(at))

    def where(self, i: int) -> str:
        """Return file and line of a row, for error messages."""
        part, at = self._place(i)
        return f"{part.path}, {part.unit} {part.numbers[at] + 1}"

    def versions(self) -> list[tuple[str, int, int]]:
        """Return path, size and time of change in ns of each file."""
        found = ((part.path, os.stat(part.path)) for part in self._parts)
        return [(path, status.st_size, status.st_mtime_ns) for path, status in found]

    def _place(self, i: int) -> tuple[_Part, int]:
        if not 0 <= i < len(self):
            raise IndexError(f"row {i} of {len(self)}")
        part = bisect.bisect_right(self._ends, i)
        return self._parts[part], i - (self._ends[part - 1] if part else 0)


@contextmanager
def error_at(where: str) -> Iterator[None]:
    """Put ``where`` before the message of a DataError."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{where}: {error}") from None


def open_rows(path: str) -> Rows:
    """Return the rows of a file, or of a folder with such files.

    A folder that `datasets.save_to_disk` wrote lists its files in state.json.  Raises DataError.
    """
    if not os.path.isdir(path):
        return Rows([_open_file(path)])
    state = os.path.join(path, "state.json")
    if os.path.isfile(state):
        names = _files_in(state)
    else:
        names = sorted(n for n in glob.glob("*", root_dir=path) if _extension(n) in _READERS)
    if not names:
        raise DataError(
            f"{path} has no {', '.join(_READERS)} file; give a file, or the folder of one split"
        )
    return Rows([_open_file(os.path.join(path, name)) for name in names])


def _files_in(state: str) -> list[str]:
    """Return the files that state.json of a folder of `datasets` lists.  Raises DataError."""
    with open(state, "rb") as file, error_at(state):
        content = _parse_json(file.read(), "save the dataset again")
    try:
        return [os.path.basename(entry["filename"]) for entry in content["_data_files"]]
    except (KeyError, TypeError):
        raise DataError(
            f"{state} has no list _data_files of files: save the dataset again"
        ) from None


def read_row(rows: Rows, i: int, of_row: Callable[[Mapping[str, Any]], T]) -> T:
    """Return the result of ``of_row`` for row ``i``.  Raises DataError with file and line."""
    row = rows[i]
    with error_at(rows.where(i)):
        return of_row(row)


def read_all(rows: Rows, of_row: Callable[[Mapping[str, Any]], T], unit: str) -> list[T]:
    """Return the results of ``of_row`` for all rows, which are ``unit``.

    Raises DataError that lists the rows for which ``of_row`` raises one.
    """
    found: list[T] = []
    problems: list[str] = []
    with Progress("encoding", len(rows), unit) as progress:
        for i in range(len(rows)):
            try:
                found.append(read_row(rows, i, of_row))
            except DataError as error:
                problems.append(str(error))
            progress.add()
    if problems:
        more = len(problems) - _SHOWN
        lines = "\n".join(problems[:_SHOWN]) + (f"\nand {more} more" if more > 0 else "")
        raise DataError(f"{len(problems)} of {len(rows)} {unit} are wrong:\n{lines}")
    return found


def keys_of(row: Mapping[str, Any]) -> str:
    """Return the keys of a row that have values, for error messages."""
    return ", ".join(key for key, value in row.items() if value is not None) or "nothing"


def _open_file(path: str) -> _Part:
    if not os.path.isfile(path):
        raise DataError(f"{path} does not exist; give a jsonl or parquet file, or a folder of them")
    extension = _extension(path)
    if extension not in _READERS:
        raise DataError(f"{path} is no {', '.join(_READERS)} file; write one row per line as JSON")
    return _READERS[extension](path)


def _extension(path: str) -> str:
    return os.path.splitext(path.removesuffix(_COMPRESSED))[1]


def _open_json(path: str) -> _Part:
    """Return the rows of a file of JSON: a list of objects, or one object per line."""
    data = _decompress(path) if path.endswith(_COMPRESSED) else None
    with _open(path, data) as file:
        head = file.read(_BLOCK)
        if head.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
            with error_at(path):
                rows = _parse_json(
                    head + file.read(), "write one list of objects, or one object per line"
                )
            return _Part(path, "element", range(len(rows)), rows.__getitem__)
        file.seek(0)
        # Negative: a blank line, which holds no row.  One number per line, as a file may have many.
        sizes = (-len(line) if line.isspace() else len(line) for line in file)
        signed = np.fromiter(sizes, np.int64)
    ends = np.abs(signed).cumsum()
    numbers = np.flatnonzero(signed > 0)
    bounds = np.stack([ends[numbers] - signed[numbers], ends[numbers]], axis=1)
    return _Part(path, "line", numbers, partial(_read_line, path, data, bounds))


def _open(path: str, data: bytes | None) -> BinaryIO:
    """Open a file; ``data``: its bytes if it is compressed."""
    return open(path, "rb") if data is None else io.BytesIO(data)


def _read_line(path: str, data: bytes | None, bounds: np.ndarray, i: int) -> object:
    start, end = bounds[i].tolist()
    with _open(path, data) as file:
        file.seek(start)
        return _parse_json(file.read(end - start), "write one object per line")


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
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be decompressed: {error}; copy it again") from None
    return bytes(found)


def parse_object(data: bytes, fix: str) -> Mapping[str, Any]:
    """Return the object of JSON text.  Raises DataError."""
    return _check_object(_parse_json(data, fix))


def _parse_json(data: bytes, fix: str) -> Any:
    try:
        value = json.loads(data.decode("utf-8-sig"))
        if b"\\ud" in data.lower():  # half a pair of surrogates is not a character
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise DataError(f"half of a character: {error}; remove it") from None
    except UnicodeDecodeError as error:
        raise DataError(
            f"it is no UTF-8 text: {error}; save it as UTF-8 (compressed: name it .gz)"
        ) from None
    except (ValueError, RecursionError, MemoryError) as error:
        reason = repr(error)
        if isinstance(error, json.JSONDecodeError):  # whose text counts lines of this value
            reason = f"{error.msg} at character {error.pos + 1}"
        raise DataError(f"it is no JSON: {reason}; {fix}") from None
    return value


def _check_object(value: object) -> Mapping[str, Any]:
    if isinstance(value, dict):
        return value
    raise DataError(f"it is {value!r:.60}, not an object")


def _open_table(path: str) -> _Part:
    """Return the rows of a parquet or Arrow file, whose columns stay in the memory map."""
    pyarrow = require("pyarrow", path)
    try:
        if path.endswith(".parquet"):
            table = require("pyarrow.parquet", path).read_table(path)
        else:
            source = pyarrow.memory_map(path)
            table = require("pyarrow.ipc", path).open_stream(source).read_all()
            table.validate(full=True)  # offsets beyond the file would end the process
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read: {error}; write it again") from None
    return _Part(path, "row", range(table.num_rows), partial(_row_of_table, table))


def _row_of_table(table: Any, i: int) -> object:
    try:
        row: Mapping[str, Any] = table.slice(i, 1).to_pylist()[0]
    except (ArithmeticError, LookupError, ValueError) as error:
        # A text that is not UTF-8, or a date in the year 10**9.
        raise DataError(f"a value has no meaning: {error}; correct it") from None
    return {key: value for key, value in row.items() if value is not None}


_READERS: Mapping[str, Callable[[str], _Part]] = {
    ".jsonl": _open_json,
    ".json": _open_json,
    ".parquet": _open_table,
    ".arrow": _open_table,
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
_ROLES_WITH_IMAGES = ("system", "user", "assistant")
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
    if row.get("messages") is not None:
        messages = messages_of(row["messages"], "messages")
    elif row.get("conversations") is not None:
        messages = sharegpt_messages(row)
    else:
        row = from_alpaca(row) or row
        if row.get("prompt") is None or row.get("completion") is None:
            raise DataError(
                "a row needs messages, conversations, prompt and completion, or instruction and "
                f"output; this one has {keys_of(row)}"
            )
        return answered_prompt(row, row["prompt"], "completion")
    check_turns(messages)
    return Conversation(messages, tools_of(row))


def form_of(row: Mapping[str, Any]) -> str:
    """Return the name of the form of a row, for the log."""
    for name, fields in _FORMS.items():
        if all(row.get(field) is not None for field in fields):
            return name
    return "another form"


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


def messages_of(found: object, name: str, *, with_images: bool = False) -> tuple[Message, ...]:
    """Return the messages of field ``name`` of a row, without keys that have no value.

    Those of ShareGPT get the keys role and content; contents in parts are joined.  ``with_images``:
    a content may have parts that are images, and a message may have a question and its answer.
    """
    if isinstance(found, np.ndarray):
        found = found.tolist()
    if not isinstance(found, list) or not found:
        raise DataError(f"{name} is {found!r:.60}; it must be a list of messages")
    if with_images:
        pair = "user", "assistant"
        parts: list[object] = []
        for message in found:
            is_pair = isinstance(message, Mapping) and message.keys() >= {*pair}
            parts += [{"role": r, "content": message[r]} for r in pair] if is_pair else [message]
        found = parts
    return tuple(_message(i, message, with_images) for i, message in enumerate(found))


def sharegpt_messages(row: Mapping[str, Any]) -> tuple[Message, ...]:
    """Return the messages of ``conversations``, and before them the text of field ``system``."""
    messages = messages_of(row["conversations"], "conversations")
    text = row.get("system")
    if not text or messages[0]["role"] == "system":
        return messages
    return (_message(0, {"role": "system", "content": text}), *messages)


def _message(i: int, message: object, with_images: bool = False) -> Message:
    """Return message ``i``, checked.  Raises DataError."""
    if isinstance(message, Mapping) and "role" not in message and "from" in message:
        role = message["from"]
        known = _SHAREGPT_ROLES.get(role, role) if isinstance(role, str) else role
        rest = {key: value for key, value in message.items() if key not in ("from", "value")}
        message = {"role": known, "content": message.get("value"), **rest}
    roles = _ROLES_WITH_IMAGES if with_images else ROLES
    if not isinstance(message, Mapping) or message.get("role") not in roles:
        raise DataError(f"message {i} is {message!r:.100}; it needs a role of {', '.join(roles)}")
    # Tables have every key in every row.
    filled = {key: value for key, value in message.items() if value is not None}
    content = filled.setdefault("content", None)
    if isinstance(content, list):
        filled["content"] = "".join(_text_of_part(i, part, with_images) for part in content)
    if content is None and (with_images or not filled.get("tool_calls")):
        raise DataError(f"message {i} ({message['role']}) has no content")
    for key in ("content", "reasoning_content"):
        if filled.get(key) is not None and not isinstance(filled[key], str):
            raise DataError(f"the {key} of message {i} is {filled[key]!r:.60}; it must be a text")
    calls = filled.get("tool_calls") or []
    listed = calls if isinstance(calls, list) else [None]
    functions = [c.get("function", c) if isinstance(c, Mapping) else c for c in listed]
    if not all(isinstance(f, Mapping) and isinstance(f.get("name"), str) for f in functions):
        raise DataError(
            f"the tool_calls of message {i} are {calls!r:.60}; they must be a list of "
            '{"function": {"name": ..., "arguments": ...}}'
        )
    return filled


def _text_of_part(i: int, part: Any, with_images: bool) -> str:
    """Return the text of {"type": "text", "text": ...}, or the token of an image."""
    kind = part.get("type", "text") if isinstance(part, Mapping) else None
    if kind == "image" and with_images:
        return IMAGE_TOKEN
    if kind == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise DataError(
        f"a part of message {i} is {part!r:.60}; parts must be texts "
        '({"type": "text", "text": ...}); pretrain_vlm.py trains on images'
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


def turns_of(
    record: Mapping[str, Any], num_images: int, caption_prompt: str
) -> list[dict[str, str]]:
    """Return the turns of a record with conversations, texts, messages, caption or text.

    A caption is the answer to all images and ``caption_prompt``.  Raises DataError for other
    records.
    """
    for name in _LISTS:
        if name in record:
            messages = messages_of(record[name], name, with_images=True)
            return [{key: turn[key] for key in ("role", "content")} for turn in messages]
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

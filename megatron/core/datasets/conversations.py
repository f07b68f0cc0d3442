"""Conversations in the rows of training data, of text alone and of images and text.

A row of text has ``messages`` (and ``tools``), or ``prompt`` and ``completion``: two texts, which
no template changes, or two lists of messages, of which only the second is trained.  Rows of
ShareGPT have ``conversations``, whose messages have ``from`` and ``value``.  Rows of Alpaca have
``instruction``, ``input`` and ``output``; each stands for a prompt and a completion.

The text of a sample with images has turns: a turn is a dict with role (system, user, assistant)
and content; ``<image>`` in a content stands for the next image of the sample.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron.core.config.errors import DataError
from megatron.core.datasets.row_files import keys_of

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

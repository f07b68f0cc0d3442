"""Conversations of fine-tuning data: what a row may hold.

A row has ``messages`` (and ``tools``), or ``prompt`` and ``completion``: two texts, which no
template changes, or two lists of messages, of which only the second is trained.  Rows of ShareGPT
have ``conversations``, whose messages have ``from`` and ``value``.  Rows of Alpaca have
``instruction``, ``input`` and ``output``; each stands for a prompt and a completion.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron.core.config.errors import DataError
from megatron.training.datasets.row_files import Rows, keys_of, read_row
from megatron.training.tokenizer.base import MegatronTokenizer
from megatron.training.tokenizer.chat import ChatTemplate, EncodedChat, Message, Span, encode_text

ROLES = ("system", "developer", "user", "assistant", "tool")
_BEFORE = {  # role -> roles that may precede it; None: the beginning
    "system": (None,),
    "developer": (None, "system"),
    "user": (None, "system", "developer", "user", "assistant", "tool"),
    "assistant": ("user", "tool"),
    "tool": ("assistant", "tool"),
}
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant"}


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


def read_conversation(rows: Rows, i: int) -> Conversation:
    """Return the conversation in row ``i``, checked.  Raises DataError with file and line."""
    return read_row(rows, i, conversation_of)


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
    """Return a prompt with the answer in field ``name`` of ``row``, which alone is trained.

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
        content = filled["content"] = _joined(i, content)
    if content is None and not filled.get("tool_calls"):
        raise DataError(f"message {i} ({message['role']}) has no content")
    for key in ("content", "reasoning_content"):
        if filled.get(key) is not None and not isinstance(filled[key], str):
            raise DataError(f"the {key} of message {i} is {filled[key]!r:.60}; it must be a text")
    _check_calls(i, filled.get("tool_calls"))
    return filled


def _joined(i: int, parts: Sequence[Any]) -> str:
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

"""Read the text of an image-text sample as a conversation.

A turn is a dict with role (system, user, assistant) and content; ``<image>`` in a content stands
for the next image of the sample.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from megatron.core.config.errors import DataError

IMAGE_TOKEN = "<image>"
_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
}
_LISTS = ("conversations", "texts", "messages")
_CAPTIONS = ("caption", "text")


def parse_record(data: bytes) -> Mapping[str, Any]:
    """Return the JSON object of a sample; raise DataError if it is none."""
    try:
        record = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DataError(f"its .json is no JSON ({error})") from error
    if not isinstance(record, dict):
        raise DataError(f"its .json is a {type(record).__name__}, not an object")
    return record


def conversation_of(
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
    known = _ROLES.get(role) if isinstance(role, str) else None
    if known is None:
        raise DataError(f"a turn is by {role!r:.40}; known are {', '.join(_ROLES)}")
    if isinstance(content, list):
        content = _joined(content)
    if not isinstance(content, str):
        raise DataError(f"a turn of the {known} is {content!r:.60}, not a text")
    return {"role": known, "content": content}


def _joined(parts: Sequence[Any]) -> str:
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

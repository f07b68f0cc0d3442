"""Calls of tools in generated text, in the form of Hermes:

<tool_call>
{"name": "weather", "arguments": {"city": "Paris"}}
</tool_call>
"""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass, field
from typing import Any

from megatron.inference.server.errors import ApiError
from megatron.inference.server.fields import parse_json
from megatron.inference.text import StopFinder

_BEGIN = "<tool_call>"
_END = "</tool_call>"


@dataclass
class ToolCallParser:
    """Separate content from calls in a text that comes in parts.

    What is between the tags and is no call stays content.
    """

    _finder: StopFinder = field(default_factory=lambda: StopFinder([_BEGIN]))
    _inside: str | None = None  # the text since a begin tag
    num_calls: int = 0

    def add(self, text: str, *, is_last: bool = False) -> tuple[str, list[dict[str, Any]]]:
        """Return new content and new calls."""
        content = ""
        calls = []
        while True:
            if self._inside is None:
                shown, tag = self._finder.add(text)
                content += shown
                if tag is None:
                    break
                text = self._finder.rest
                self._inside = ""
            self._inside += text
            inside, tag, text = self._inside.partition(_END)
            if not tag:
                break
            self._inside = None
            call = read_call(inside)
            if call is None:
                content += _BEGIN + inside + _END
            else:
                calls.append(call)
                self.num_calls += 1
        if is_last:
            content += self._finder.end()
            if self._inside is not None:
                call = read_call(self._inside)  # a text may end before the end tag
                if call is None:
                    content += _BEGIN + self._inside
                else:
                    calls.append(call)
                    self.num_calls += 1
                self._inside = None
        return content, calls


def read_call(text: str) -> dict[str, Any] | None:
    """Return OpenAI's object for a call, or None if ``text`` is no call."""
    try:
        found = parse_json(text.encode(), "a call")  # its values must fit into an answer
    except ApiError:
        return None
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return None
    arguments = found.get("arguments", found.get("parameters", {}))
    return call_object(found["name"], json.dumps(arguments, ensure_ascii=False))


def call_object(name: str, arguments: str) -> dict[str, Any]:
    """Return OpenAI's object for a call."""
    return {
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }

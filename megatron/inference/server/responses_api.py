"""POST /v1/responses: OpenAI's Responses, as a chat with other names.

The fields become those of a chat, which checks them.  The server keeps no responses: a client
sends the conversation in ``input``.  The events of a stream tell how the items of ``output`` grow;
a complete answer has the same items.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from megatron.inference.server.chat_formats import Part
from megatron.inference.server.fields import ApiError, Body, Fields, renamed
from megatron.inference.server.generation import Objects, Sample, Service
from megatron.inference.server.openai_api import ChatRequest
from megatron.inference.text import TextDelta

# Fields of chats that responses lack, or have under another name.
NOT_OF_RESPONSES = (
    "messages max_tokens max_completion_tokens n response_format logprobs top_logprobs "
    "prompt_logprobs return_token_ids reasoning_effort continue_final_message"
).split()
_NEW_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
_ECHO = "instructions metadata max_output_tokens max_tool_calls reasoning text".split()
_KEPT_NOWHERE = ("previous_response_id", "conversation", "prompt")
_TEXT_KINDS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
_EVENTS = {"content": "output_text", "reasoning": "reasoning_text"}


class ResponsesRequest(ChatRequest):
    """POST /v1/responses: text or items -> items of text, reasoning and calls of tools."""

    def __init__(self, service: Service, body: Body) -> None:
        """Read the fields that chats lack, and those that all requests have.  Raises ApiError."""
        own = Fields(body)
        self._echo = {name: body.get(name) for name in _ECHO}
        chat = _chat_body(own, body)
        left = own.others(chat, NOT_OF_RESPONSES)
        self._output = _Output()
        try:
            super().__init__(service, left)
        except ApiError as error:
            raise renamed(error, _NEW_NAMES) from None

    async def read(self) -> None:
        """Read the other fields, render the prompt, and set ``generation``.  Raises ApiError."""
        try:
            await super().read()
        except ApiError as error:
            raise renamed(error, _NEW_NAMES) from None

    def take(self, sample: Sample, delta: TextDelta) -> list[Part]:
        """Add new text to the items."""
        self.events(sample, delta)
        return []

    def events(self, sample: Sample, delta: TextDelta) -> Objects:
        """Return the events of new text."""
        output = self._output
        found: Objects = []
        if output.is_new:
            response = self._response(sample, "in_progress")
            found = [output.event(kind, response=response) for kind in ("created", "in_progress")]
        for part in super().take(sample, delta):
            found += output.add(part)
        if delta.finish_reason is not None:
            is_cut = delta.finish_reason == "length"
            found += output.close("incomplete" if is_cut else "completed")
        return found

    def last_events(self, samples: list[Sample]) -> Objects:
        """Return the event with the complete response."""
        response = self.complete_object(samples)
        return [self._output.event(response["status"], response=response)]

    def complete_object(self, samples: list[Sample]) -> dict[str, Any]:
        """Return the response."""
        (sample,) = samples
        is_cut = sample.finish_reason == "length"
        usage: Any = self.usage(samples)
        return self._response(
            sample,
            "incomplete" if is_cut else "completed",
            output=self._output.items,
            incomplete_details={"reason": "max_output_tokens"} if is_cut else None,
            usage={
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"],
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": usage["completion_tokens_details"],
                "total_tokens": usage["total_tokens"],
            },
        )

    def _response(self, sample: Sample, status: str, **more: object) -> dict[str, Any]:
        params = self.generation.params
        tools = [{"type": "function", **tool["function"]} for tool in self.tools.given]
        named = {"type": "function", "name": self.tools.function}
        return {
            "id": f"resp_{sample.generation_id}",
            "object": "response",
            "created_at": self.started_at,
            "status": status,
            "model": self.adapter or self.model.info.model,
            "output": [],
            "error": None,
            "incomplete_details": None,
            "parallel_tool_calls": self.tools.many,
            "previous_response_id": None,
            "store": False,
            "temperature": params.temperature,
            "tool_choice": self.tools.choice if self.tools.function is None else named,
            "tools": [{"parameters": None, "strict": False, **tool} for tool in tools],
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None,
            "weight_version": sample.weight_version,
            **self._echo,
            **more,
        }


class _Output:
    """The items of a response, and the events that tell a client about them."""

    def __init__(self) -> None:
        self.items: Objects = []
        self.is_new = True
        self._kind = ""  # of the text that grows; empty: of none
        self._spaces = ""  # before a text
        self._number = 0

    def event(self, kind: str, **more: object) -> dict[str, Any]:
        """Return an event."""
        self.is_new = False
        found = {"type": f"response.{kind}", "sequence_number": self._number, **more}
        self._number += 1
        return found

    def add(self, part: Part) -> Objects:
        """Add a part of the answer; return its events."""
        if part.kind == "call":
            return [*self.close(), *self._call(part)]
        found: Objects = []
        text = part.text
        if part.kind != self._kind:
            text = self._spaces + text
            if not text.strip():  # between calls: no message
                self._spaces = text
                return []
            found = [*self.close(), *self._open(part.kind)]
        self.items[-1]["content"][0]["text"] += text
        return [*found, self._of_text("delta", delta=text)]

    def close(self, status: str = "completed") -> Objects:
        """End the text that grows; return the events of its end."""
        self._spaces = ""
        if not self._kind:
            return []
        item = self.items[-1]
        part = item["content"][0]
        item["status"] = status
        found = [self._of_text("done", text=part["text"]), self._of_part("done", part)]
        self._kind = ""
        return [*found, self._of_item("done", item)]

    def _open(self, kind: str) -> Objects:
        """Begin a message or a reasoning item."""
        part: dict[str, Any] = {"type": _EVENTS[kind], "text": ""}
        item: dict[str, Any] = {"status": "in_progress", "content": [part]}
        if kind == "content":
            part |= {"annotations": [], "logprobs": []}
            item |= {"id": _new_id("msg"), "type": "message", "role": "assistant"}
        else:
            item |= {"id": _new_id("rs"), "type": "reasoning", "summary": []}
        self._kind = kind
        self.items.append(item)
        added = self._of_item("added", {**item, "content": []})
        return [added, self._of_part("added", {**part})]

    def _call(self, part: Part) -> Objects:
        item = {
            "id": _new_id("fc"),
            "type": "function_call",
            "status": "completed",
            "call_id": part.call_id,
            "name": part.name,
            "arguments": part.text,
        }
        self.items.append(item)
        added = self._of_item("added", {**item, "status": "in_progress", "arguments": ""})
        where = {"item_id": item["id"], "output_index": len(self.items) - 1}
        kind = "function_call_arguments"
        delta = self.event(f"{kind}.delta", **where, delta=part.text)
        done = self.event(f"{kind}.done", **where, name=part.name, arguments=part.text)
        return [added, delta, done, self._of_item("done", item)]

    def _of_item(self, kind: str, item: dict[str, Any]) -> dict[str, Any]:
        return self.event(f"output_item.{kind}", output_index=len(self.items) - 1, item=item)

    def _of_part(self, kind: str, part: dict[str, Any]) -> dict[str, Any]:
        return self.event(f"content_part.{kind}", **self._where(), part=part)

    def _of_text(self, kind: str, **more: object) -> dict[str, Any]:
        logs: dict[str, Any] = {"logprobs": []} if self._kind == "content" else {}
        return self.event(f"{_EVENTS[self._kind]}.{kind}", **self._where(), **logs, **more)

    def _where(self) -> dict[str, Any]:
        index = len(self.items) - 1
        return {"item_id": self.items[index]["id"], "output_index": index, "content_index": 0}


def _new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(16)}"


def _chat_body(fields: Fields, body: Body) -> dict[str, Any]:
    """Return the fields of a chat for those that have other names or forms here."""
    for name in _KEPT_NOWHERE:
        if fields.get(name) is not None:
            reason = "this server keeps no responses; send the conversation in input"
            raise fields.fail(name, reason)
    if fields.boolean("background"):
        raise fields.fail("background", "a response is sent when it is asked for; leave it out")
    fields.choice("truncation", "disabled", ("disabled",))
    fields.list_of("include", _included, 16)
    fields.get("max_tool_calls")  # of tools that OpenAI runs
    fields.sub_object("metadata")  # any names and values; sent back
    if (options := fields.sub_object("stream_options")) is not None:
        options.boolean("include_obfuscation")
        options.refuse_others()
    chat = {
        "messages": _messages(fields),
        "max_completion_tokens": fields.get("max_output_tokens"),
        "tools": fields.list_of("tools", _tool, 128),
        "tool_choice": _tool_choice(fields.get("tool_choice")),
    }
    reasoning = fields.sub_object("reasoning")
    if reasoning is not None:
        chat["reasoning_effort"] = reasoning.text("effort", None)
        for name in ("summary", "generate_summary"):
            reasoning.text(name, None)  # reasoning is sent as it is written
        reasoning.refuse_others()
    text = fields.sub_object("text")
    form = text.sub_object("format") if text is not None else None
    if text is not None:
        text.text("verbosity", None)
        text.refuse_others()
    if form is not None:
        kind = form.get("type")
        schema = {name: form.get(name) for name in ("name", "schema", "strict", "description")}
        has_schema = {"json_schema": schema} if kind == "json_schema" else {}
        chat["response_format"] = {"type": kind, **has_schema}
        form.refuse_others()
    return chat


def _messages(fields: Fields) -> Objects:
    """Return ``instructions`` and ``input`` as messages of a chat."""
    instructions = fields.text("instructions", None)
    found: Objects = []
    if instructions is not None:
        found.append({"role": "system", "content": instructions})
    given = fields.get("input")
    if isinstance(given, str):
        return [*found, {"role": "user", "content": given}]
    reasoning = None  # of the assistant's next item
    for item in fields.list_of("input", _item, 4096):
        kind = item.get("type", "message")
        own: dict[str, Any] = {"role": "assistant"}
        if reasoning is not None:
            own["reasoning_content"] = reasoning
        if kind == "reasoning":
            parts = _parts(item.get("content") or item.get("summary") or [], fields)
            if not isinstance(parts, list):
                raise ApiError("input: the content of reasoning is a list of parts", "input")
            reasoning = "".join(part.get("text", "") for part in parts)
            continue
        if kind == "function_call":
            if reasoning is None and found and found[-1]["role"] == "assistant":
                own = found.pop()  # its text and its calls are one message
            function = {name: item.get(name) for name in ("name", "arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            found.append({**own, "tool_calls": [*own.get("tool_calls", []), call]})
        elif kind == "function_call_output":
            content = _parts(item.get("output"), fields)
            found.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
        else:
            own = own if item.get("role") == "assistant" else {"role": item.get("role")}
            found.append({**own, "content": _parts(item.get("content"), fields)})
        reasoning = None
    return found


def _item(name: str, value: object) -> Mapping[str, Any]:
    kinds = ("message", "function_call", "function_call_output", "reasoning")
    if not isinstance(value, dict) or value.get("type", "message") not in kinds:
        raise ApiError(f"{name}: give a text, or items of type {', '.join(kinds)}", name)
    return value


def _parts(content: Any, fields: Fields) -> Any:
    """Return the content of an item as that of a message."""
    if not isinstance(content, list):
        return content
    found: Objects = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in _TEXT_KINDS:
            text = fields.check_text("input", part.get("text"))
            found.append({"type": "text", "text": text})
        elif kind == "input_image":
            image: dict[str, Any] = {"url": part.get("image_url"), "detail": part.get("detail")}
            found.append({"type": "image_url", "image_url": image})
        else:
            raise ApiError(f"input: a part of type {kind!r:.80} cannot be read", "input")
    return found


def _tool(name: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict) or value.get("type") != "function":
        raise ApiError(f"{name}: this server knows tools of type function only", name)
    function = {k: v for k, v in value.items() if k != "type" and v is not None}
    return {"type": "function", "function": function}


def _tool_choice(value: Any) -> Any:
    if isinstance(value, dict) and "function" not in value:
        return {"type": "function", "function": {"name": value.get("name")}}
    return value


def _included(name: str, value: object) -> object:
    if value != "reasoning.encrypted_content":  # reasoning is sent openly
        raise ApiError(f"{name}: {value!r:.80} is not known here; leave it out", name)
    return value

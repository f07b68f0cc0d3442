"""Fields of a chat request: messages, tools, and the form of the answer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from typing import Any

from megatron.inference.server.chat_images import PARAM
from megatron.inference.server.errors import ApiError
from megatron.inference.server.fields import Fields, parse_json
from megatron.inference.server.model import Model
from megatron.training.tokenizer.multimodal_tokenizer import IMAGE_TOKEN

_ROLES = ("system", "developer", "user", "assistant", "tool")
_MAX_MESSAGES = 4096
_MAX_TOOLS = 128
_ANY_OBJECT = '{"type": "object"}'


@dataclass(frozen=True)
class Tools:
    """Tools that the model may call.

    ``function``: the answer is the arguments of this one.  ``is_required``: the answer is a call.
    ``are_parsed``: calls are looked for in the answer.
    """

    given: list[dict[str, Any]]
    are_parsed: bool = False
    is_required: bool = False
    function: str | None = None
    many: bool = True

    @property
    def is_call(self) -> bool:
        """Whether the whole text is a call, by its grammar."""
        return self.is_required or self.function is not None


def read_messages(fields: Fields, model: Model) -> tuple[list[dict[str, Any]], list[str]]:
    """Read ``messages`` as a chat template expects them: each content is a string.

    Images are tags ``<image>`` in it, and the list of their URLs.
    """
    if not fields.get("messages"):
        raise ApiError("messages: give at least one message", "messages")
    urls: list[str] = []
    read = partial(_message, urls if model.image_prompts is not None else None)
    return fields.list_of("messages", read, _MAX_MESSAGES), urls


def _message(urls: list[str] | None, name: str, value: object) -> dict[str, Any]:
    """Read a message, and add the URLs of its images; no images can be read if ``urls`` is None."""
    if not isinstance(value, dict):
        raise ApiError("messages: each message is an object", "messages")
    fields = Fields(value, name)
    role = fields.choice("role", "", _ROLES)
    message: dict[str, Any] = {"role": "system" if role == "developer" else role}
    calls = fields.list_of("tool_calls", _tool_call, _MAX_TOOLS)
    content = fields.get("content")
    of_message: list[str] | None = [] if urls is not None else None
    if isinstance(content, list):
        read = partial(_part, of_message, role)
        message["content"] = "".join(fields.list_of("content", read, _MAX_MESSAGES))
    elif content is None and calls:
        message["content"] = ""
    else:
        message["content"] = fields.check_text("content", content)
    if urls is not None and of_message is not None:
        if message["content"].count(IMAGE_TOKEN) != len(of_message):
            raise ApiError(
                f"messages: a text has {IMAGE_TOKEN}, which stands for an image in this model: "
                "send images as parts of type image_url, and another text",
                "messages",
            )
        urls += of_message
    if calls:
        message["tool_calls"] = calls
    for other in ("name", "tool_call_id", "reasoning_content"):
        text = fields.text(other, None)
        if text is not None:
            message[other] = text
    fields.without_effect(("refusal", "audio", "function_call", "annotations"))
    fields.refuse_others()
    return message


def _part(urls: list[str] | None, role: str, name: str, value: object) -> str:
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(value, dict) and kind == "text":
        return Fields(value, "messages.content").check_text("text", value.get("text"))
    if not isinstance(value, dict) or kind != "image_url" or urls is None:
        kinds = "text only" if urls is None else "text and image_url"
        raise ApiError(f"messages.content: this model reads parts of type {kinds}", "messages")
    if role != "user":
        raise ApiError(f"{PARAM}: images stand in messages of the user", PARAM)
    fields = Fields(value, "messages.content").sub_object("image_url")
    if fields is None:
        raise ApiError(f"{PARAM}: give an object with a url", PARAM)
    urls.append(fields.check_text("url", fields.get("url")))
    fields.choice("detail", "auto", ("auto",))  # the model's tiles have one resolution
    fields.refuse_others()
    return IMAGE_TOKEN


def _tool_call(name: str, value: object) -> dict[str, Any]:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ApiError("messages.tool_calls: each needs function.name", "messages")
    assert isinstance(value, dict), "it has a function"
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):  # templates write objects themselves
        # A text cannot have surrogates that UTF-8 lacks: those of the body have been refused.
        try:
            arguments = parse_json(arguments.encode(), "function.arguments")
        except ApiError as error:
            raise ApiError(f"messages.tool_calls: {error}", "messages") from None
    return {
        "id": str(value.get("id", "")),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def read_tools(fields: Fields, model: Model) -> Tools:
    """Read ``tools``, ``tool_choice`` and ``parallel_tool_calls``."""
    given = fields.list_of("tools", _tool, _MAX_TOOLS)
    many = fields.boolean("parallel_tool_calls", True)
    choice = fields.get("tool_choice")
    if choice is None:
        choice = "auto" if given else "none"
    names = [tool["function"]["name"] for tool in given]
    if isinstance(choice, dict):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if name not in names:
            raise fields.fail("tool_choice", "name the function of one of the tools")
        need_grammar(model, "tool_choice")
        return Tools(given, function=name)
    if choice not in ("none", "auto", "required") or (choice != "none" and not given):
        raise fields.fail("tool_choice", "give none, auto or required, with tools, or a function")
    if choice == "required":
        need_grammar(model, "tool_choice")
    return Tools(
        given if choice != "none" else [],
        are_parsed=choice == "auto",
        is_required=choice == "required",
        many=many,
    )


def _tool(name: str, value: object) -> dict[str, Any]:
    function = value.get("function") if isinstance(value, dict) else None
    if (
        not isinstance(value, dict)
        or value.get("type") != "function"
        or not isinstance(function, dict)
        or not isinstance(function.get("name"), str)
        or not isinstance(function.get("parameters", {}), dict)
    ):
        raise ApiError(
            'tools: each is {"type": "function", "function": {"name": ..., "parameters": {...}}}',
            "tools",
        )
    return value


def grammar_of_tools(tools: Tools) -> tuple[str, str] | None:
    """Return the grammar of an answer that must be a call."""
    parameters = {
        tool["function"]["name"]: tool["function"].get("parameters", {"type": "object"})
        for tool in tools.given
    }
    if tools.function is not None:
        return "json_schema", json.dumps(parameters[tools.function])
    if not tools.is_required:
        return None
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "arguments": schema},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for name, schema in parameters.items()
    ]
    return "json_schema", json.dumps({"anyOf": calls})


def read_response_format(fields: Fields, model: Model) -> tuple[str, str] | None:
    """Read ``response_format`` as a grammar."""
    given = fields.sub_object("response_format")
    if given is None:
        return None
    kind = given.choice("type", "text", ("text", "json_object", "json_schema", "regex"))
    grammar = None
    if kind == "json_object":
        grammar = ("json_schema", _ANY_OBJECT)
    elif kind == "json_schema":
        named = given.sub_object("json_schema")
        schema = named.get("schema") if named is not None else None
        if not isinstance(schema, dict):
            raise ApiError(
                "response_format.json_schema: give an object with a schema", "response_format"
            )
        grammar = ("json_schema", json.dumps(schema))
    elif kind == "regex":
        pattern = given.text("regex", None) or given.text("pattern", None)
        if pattern is None:
            raise ApiError("response_format.regex: give a pattern", "response_format")
        grammar = ("regex", pattern)
    given.refuse_others()
    if grammar is not None:
        need_grammar(model, "response_format")
    return grammar


def need_grammar(model: Model, param: str) -> None:
    """Raise ApiError if the engine cannot constrain the text."""
    if "grammar" not in model.info.features:
        raise ApiError(f"{param}: the engine of this server has no grammars; leave it out", param)

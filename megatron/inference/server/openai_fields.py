"""Fields of OpenAI's and vLLM's requests: sampling, the end of a text, messages and tools.

A model writes calls of tools in the form of Hermes:

<tool_call>
{"name": "weather", "arguments": {"city": "Paris"}}
</tool_call>
"""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from megatron.core.inference.sampling_params import SamplingParams
from megatron.inference.server.chat_images import PARAM
from megatron.inference.server.fields import ApiError, Fields, parse_json
from megatron.inference.server.generation import SEED_LIMIT
from megatron.inference.server.model import Model
from megatron.inference.text import StopFinder, TextRules
from megatron.training.tokenizer.multimodal_tokenizer import IMAGE_TOKEN

MAX_SAMPLES = 128
MAX_LOG_PROBS = 20
_MAX_STOPS = 16
_MAX_STOP_TOKENS = 128
_MAX_STOP_CHARACTERS = 256
# Default, least and largest value.
_NUMBERS = {
    "temperature": (1.0, 0.0, 2.0),
    "min_p": (0.0, 0.0, 1.0),
    "presence_penalty": (0.0, -2.0, 2.0),
    "frequency_penalty": (0.0, -2.0, 2.0),
}
_ROLES = ("system", "developer", "user", "assistant", "tool")
_MAX_MESSAGES = 4096
_MAX_TOOLS = 128
_ANY_OBJECT = '{"type": "object"}'


def read_params(fields: Fields, model: Model, num_tokens: int) -> SamplingParams:
    """Read the sampling parameters of a request that generates ``num_tokens`` at most."""
    seed = fields.integer("seed", None, -SEED_LIMIT, SEED_LIMIT - 1)
    top_p = fields.number("top_p", 1.0, 0.0, 1.0)
    if top_p == 0:
        raise fields.fail("top_p", "give a number above 0; temperature 0 is greedy")
    repetition_penalty = fields.number("repetition_penalty", 1.0, 0.0, 100.0)
    if repetition_penalty == 0:
        raise fields.fail("repetition_penalty", "give a number above 0")
    top_k = fields.integer("top_k", 0, -1, model.info.vocab_size)
    stop_ids = fields.get("stop_token_ids")
    stop_ids = [] if stop_ids is None else stop_ids
    fields.token_ids("stop_token_ids", stop_ids, model.info.vocab_size, _MAX_STOP_TOKENS)
    numbers: dict[str, Any] = {n: fields.number(n, *limits) for n, limits in _NUMBERS.items()}
    return SamplingParams(
        **numbers,
        top_k=max(top_k, 0),  # -1 is vLLM's "no limit"
        top_p=top_p,
        seed=None if seed is None else seed % SEED_LIMIT,
        repetition_penalty=repetition_penalty,
        logit_bias=_logit_bias(fields, model.info.vocab_size),
        min_tokens=fields.integer("min_tokens", 0, 0, num_tokens),
        stop_token_ids=tuple(stop_ids),
        ignore_eos=fields.boolean("ignore_eos"),
        num_tokens_to_generate=num_tokens,
        prompt_log_probs_only=num_tokens == 0,
    )


def with_log_probs(params: SamplingParams, top: int | None, prompt: int | None) -> SamplingParams:
    """Ask for log-probabilities too.

    ``top`` and ``prompt``: number of likely tokens for each generated token and each token of the
    prompt; None: no log-probabilities of those.
    """
    return replace(
        params,
        return_log_probs=top is not None or prompt is not None,
        top_n_logprobs=max(top or 0, prompt or 0),
        return_prompt_log_probs=prompt is not None,
        return_prompt_top_n_logprobs=bool(prompt),
    )


def read_rules(fields: Fields, model: Model, params: SamplingParams) -> TextRules:
    """Read the fields that end a text."""
    value = fields.get("stop")
    if isinstance(value, str):
        stops = [fields.check_text("stop", value)]
    else:
        stops = fields.list_of("stop", fields.check_text, _MAX_STOPS)
    for stop in stops:
        if not 0 < len(stop) <= _MAX_STOP_CHARACTERS:
            raise fields.fail("stop", f"a stop string has 1 to {_MAX_STOP_CHARACTERS} characters")
    return TextRules(
        end_tokens=model.end_tokens(params),
        stops=tuple(stops),
        min_tokens=params.min_tokens,
        keeps_stop=fields.boolean("include_stop_str_in_output"),
    )


def read_stream(fields: Fields) -> tuple[bool, bool]:
    """Read whether to stream, and whether a last event then has the usage."""
    is_stream = fields.boolean("stream")
    options = fields.sub_object("stream_options")
    if options is None:
        return is_stream, False
    if not is_stream:
        raise ApiError("stream_options: only with stream: true", "stream_options")
    has_usage = options.boolean("include_usage")
    options.refuse_others()
    return is_stream, has_usage


def _logit_bias(fields: Fields, vocab_size: int) -> dict[int, float]:
    given = fields.sub_object("logit_bias")
    names: Any = fields.get("logit_bias") or {}
    if len(names) > vocab_size:
        raise fields.fail("logit_bias", f"the vocabulary has {vocab_size} tokens")
    biases: dict[int, float] = {}
    for name in names:
        if given is None or not name.isdecimal() or len(name) > 9 or int(name) >= vocab_size:
            reason = f"its fields are token ids from 0 to {vocab_size - 1}"
            raise fields.fail("logit_bias", reason)
        biases[int(name)] = given.number(name, 0.0, -100.0, 100.0)
    return biases


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
        # A text has no half of a surrogate pair: `parse_json` of the body has refused it.
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


_BEGIN = "<tool_call>"
_END = "</tool_call>"


@dataclass
class ToolCallParser:
    """Separate content from calls in a text that comes in parts.

    Text between the tags that holds no call stays content.
    """

    _finder: StopFinder = field(default_factory=lambda: StopFinder([_BEGIN]))
    _inside: str | None = None  # the text since a begin tag

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
        if is_last:
            content += self._finder.end()
            if self._inside is not None:
                call = read_call(self._inside)  # a text may end before the end tag
                if call is None:
                    content += _BEGIN + self._inside
                else:
                    calls.append(call)
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

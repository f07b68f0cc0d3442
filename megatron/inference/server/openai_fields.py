"""Fields of OpenAI's and vLLM's requests: sampling, the end of a text, messages and tools."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from megatron.core.inference.sampling_params import SamplingParams
from megatron.inference.server.chat_images import PARAM
from megatron.inference.server.fields import ApiError, Fields, parse_json
from megatron.inference.server.generation import SEED_LIMIT
from megatron.inference.server.model import Model
from megatron.inference.text import TextRules
from megatron.training.tokenizer.multimodal_tokenizer import IMAGE_TOKEN

MAX_SAMPLES = 128
MAX_LOG_PROBS = 20
_MAX_STOPS = 16
_MAX_STOP_TOKENS = 128
_MAX_STOP_CHARACTERS = 256
_MAX_BAD_WORDS = 128
_MAX_CHOICES = 1024
# Default, least and largest value.
_NUMBERS = {
    "temperature": (1.0, 0.0, 2.0),
    "top_p": (1.0, 0.0, 1.0),
    "min_p": (0.0, 0.0, 1.0),
    "repetition_penalty": (1.0, 0.0, 100.0),
    "presence_penalty": (0.0, -2.0, 2.0),
    "frequency_penalty": (0.0, -2.0, 2.0),
}
_ROLES = ("system", "developer", "user", "assistant", "tool")
_MAX_MESSAGES = 4096
_MAX_TOOLS = 128
Grammar: TypeAlias = tuple[str, str]  # kind and text
_ANY_OBJECT: Grammar = ("json_schema", '{"type": "object"}')


async def read_params(
    fields: Fields, model: Model, num_tokens: int, top: int | None, prompt_top: int | None
) -> SamplingParams:
    """Read the sampling parameters of a request that generates ``num_tokens`` at most.

    ``top`` and ``prompt_top``: number of likely tokens for each generated token and each token of
    the prompt; None: no log-probabilities of those.
    """
    numbers: dict[str, Any] = {n: fields.number(n, *limits) for n, limits in _NUMBERS.items()}
    for name in ("top_p", "repetition_penalty"):
        if numbers[name] == 0:
            raise fields.fail(name, "give a number above 0; temperature 0 is greedy")
    seed = fields.integer("seed", None, -SEED_LIMIT, SEED_LIMIT - 1)
    top_k = fields.integer("top_k", 0, -1, model.info.vocab_size)
    stop_ids = fields.get("stop_token_ids")
    if stop_ids is not None:
        fields.token_ids("stop_token_ids", stop_ids, model.info.vocab_size, _MAX_STOP_TOKENS)
    allowed = fields.get("allowed_token_ids")
    if allowed is not None:
        size = model.info.vocab_size
        if not fields.token_ids("allowed_token_ids", allowed, size, size):
            raise fields.fail("allowed_token_ids", "give at least one token id, or leave it out")
    if fields.get("priority"):
        raise fields.fail("priority", "requests run in the order of their arrival; leave it out")
    fields.boolean("spaces_between_special_tokens", True)  # no text has spaces that tokens lack
    return SamplingParams(
        **numbers,
        top_k=max(top_k, 0),  # -1 is vLLM's "no limit"
        seed=None if seed is None else seed % SEED_LIMIT,
        logit_bias=_logit_bias(fields, model.info.vocab_size),
        min_tokens=fields.integer("min_tokens", 0, 0, num_tokens),
        stop_token_ids=tuple(stop_ids or ()),
        ignore_eos=fields.boolean("ignore_eos"),
        num_tokens_to_generate=num_tokens,
        prompt_log_probs_only=num_tokens == 0,
        return_log_probs=top is not None or prompt_top is not None,
        top_n_logprobs=max(top or 0, prompt_top or 0),
        return_prompt_log_probs=prompt_top is not None,
        return_prompt_top_n_logprobs=bool(prompt_top),
        allowed_token_ids=tuple(allowed or ()),
        bad_words=await _bad_words(fields, model),
    )


async def _bad_words(fields: Fields, model: Model) -> tuple[tuple[int, ...], ...]:
    """Read ``bad_words``; each is forbidden with and without a space before it, as in vLLM."""
    words = fields.list_of("bad_words", fields.check_text, _MAX_BAD_WORDS)
    if not all(0 < len(word.strip()) <= _MAX_STOP_CHARACTERS for word in words):
        raise fields.fail("bad_words", f"a word has 1 to {_MAX_STOP_CHARACTERS} characters")
    texts = [start + word.lstrip() for word in words for start in ("", " ")]
    rows = await model.tokenize(texts, "bad_words", is_plain=True) if texts else []
    return tuple(dict.fromkeys(tuple(row) for row in rows if row))


def read_rules(fields: Fields, model: Model, params: SamplingParams) -> TextRules:
    """Read the fields that end a text."""
    value = fields.get("stop")
    is_text = isinstance(value, str)
    stops = [value] if is_text else fields.list_of("stop", fields.check_text, _MAX_STOPS)
    for stop in stops:
        if not 0 < len(stop) <= _MAX_STOP_CHARACTERS:
            raise fields.fail("stop", f"a stop string has 1 to {_MAX_STOP_CHARACTERS} characters")
    return TextRules(
        end_tokens=model.end_tokens(params),
        stops=tuple(stops),
        min_tokens=params.min_tokens,
        keeps_stop=fields.boolean("include_stop_str_in_output"),
    )


def _logit_bias(fields: Fields, vocab_size: int) -> dict[int, float]:
    given = fields.sub_object("logit_bias")
    if given is None:
        return {}
    names = fields.get("logit_bias")
    if len(names) > vocab_size:
        raise fields.fail("logit_bias", f"the vocabulary has {vocab_size} tokens")
    for name in names:
        if not name.isdecimal() or len(name) > 9 or int(name) >= vocab_size:
            raise fields.fail("logit_bias", f"its fields are token ids from 0 to {vocab_size - 1}")
    return {int(name): given.number(name, 0.0, -100.0, 100.0) for name in names}


@dataclass(frozen=True)
class Tools:
    """Tools that the model may call.

    ``choice``: "none"; "auto": calls are looked for in the answer; "required": the answer is a
    call; "function": the answer is the arguments of ``function``.  ``many``: calls of an answer.
    """

    given: list[dict[str, Any]]
    choice: str
    many: bool
    function: str | None = None

    @property
    def parameters(self) -> dict[str, Any]:
        """The JSON schema of the arguments of each function."""
        functions = [tool["function"] for tool in self.given]
        return {f["name"]: f.get("parameters", {"type": "object"}) for f in functions}


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
    own: list[str] | None = None if urls is None else []  # of this message
    if isinstance(content, list):
        read = partial(_part, own, role)
        message["content"] = "".join(fields.list_of("content", read, _MAX_MESSAGES))
    else:
        empty = "" if calls and content is None else content
        message["content"] = fields.check_text("content", empty)
    if urls is not None and own is not None:
        if message["content"].count(IMAGE_TOKEN) != len(own):
            raise ApiError(
                f"messages: a text has {IMAGE_TOKEN}, which stands for an image in this model: "
                "send images as parts of type image_url, and another text",
                "messages",
            )
        urls += own
    if calls:
        message["tool_calls"] = calls
    # vLLM calls it "reasoning", chat templates "reasoning_content".
    for other in ("name", "tool_call_id", "reasoning", "reasoning_content"):
        text = fields.text(other, None)
        if text is not None:
            message["reasoning_content" if other == "reasoning" else other] = text
    fields.refuse_others(("refusal", "audio", "function_call", "annotations"))
    return message


def _part(urls: list[str] | None, role: str, name: str, value: object) -> str:
    part = value if isinstance(value, dict) else {}
    fields = Fields(part, "messages.content")
    if part.get("type") == "text":
        return fields.check_text("text", part.get("text"))
    if part.get("type") != "image_url" or urls is None:
        kinds = "text only" if urls is None else "text and image_url"
        raise ApiError(f"messages.content: this model reads parts of type {kinds}", "messages")
    if role != "user":
        raise ApiError(f"{PARAM}: images stand in messages of the user", PARAM)
    image = fields.sub_object("image_url")
    if image is None:
        raise ApiError(f"{PARAM}: give an object with a url", PARAM)
    urls.append(image.check_text("url", image.get("url")))
    image.choice("detail", "auto", ("auto",))  # the model's tiles have one resolution
    image.refuse_others()
    return IMAGE_TOKEN


def _function_of(value: object) -> dict[str, Any] | None:
    """Return the entry ``function`` of a tool or a call; None if it has no name."""
    function = value.get("function") if isinstance(value, dict) else None
    is_named = isinstance(function, dict) and isinstance(function.get("name"), str)
    return function if is_named else None


def _tool_call(name: str, value: Any) -> dict[str, Any]:
    function = _function_of(value)
    if function is None:
        raise ApiError("messages.tool_calls: each needs function.name", "messages")
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
    name = None
    if isinstance(choice, dict):
        name = (_function_of(choice) or {}).get("name")
        choice = "function"
    is_named = name in [tool["function"]["name"] for tool in given]
    fits = is_named or (choice in ("auto", "required") and given)
    if choice != "none" and not fits:
        reason = "give none, auto or required, with tools, or the function of one of the tools"
        raise fields.fail("tool_choice", reason)
    if choice in ("required", "function"):
        need_grammar(model, "tool_choice")
    return Tools(given if fits else [], choice, many, name)


def _tool(name: str, value: Any) -> dict[str, Any]:
    function = _function_of(value)
    if (
        function is None
        or value.get("type") != "function"
        or not isinstance(function.get("parameters", {}), dict)
    ):
        raise ApiError(
            'tools: each is {"type": "function", "function": {"name": ..., "parameters": {...}}}',
            "tools",
        )
    return dict(value)


def grammar_of_tools(tools: Tools) -> Grammar | None:
    """Return the grammar of an answer that must be a call."""
    if tools.function is not None:
        return "json_schema", json.dumps(tools.parameters[tools.function])
    if tools.choice != "required":
        return None
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "arguments": schema},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for name, schema in tools.parameters.items()
    ]
    return "json_schema", json.dumps({"anyOf": calls})


def read_grammar(fields: Fields, model: Model) -> Grammar | None:
    """Read the grammar of ``response_format``, ``structured_outputs`` or a ``guided_`` field."""
    found = [_response_format(fields), *_constraints(fields, "guided_")]
    inner = fields.sub_object("structured_outputs")
    if inner is not None:
        found += _constraints(inner, "")
        if inner.boolean("json_object"):
            found.append(_ANY_OBJECT)
        inner.refuse_others()
    grammars = [grammar for grammar in found if grammar is not None]
    if len(grammars) > 1:
        text = "structured_outputs: a text follows one grammar; leave the others out"
        raise ApiError(text, "structured_outputs")
    if grammars:
        need_grammar(model, "response_format" if found[0] else "structured_outputs")
    return grammars[0] if grammars else None


def _constraints(fields: Fields, prefix: str) -> list[Grammar]:
    """Return the grammars of vLLM's fields json, regex, choice and grammar."""
    found: list[Grammar] = []
    schema = fields.get(f"{prefix}json")
    if schema is not None:
        if not isinstance(schema, dict | str):
            raise fields.fail(f"{prefix}json", "give a JSON schema, an object or its text")
        found.append(("json_schema", schema if isinstance(schema, str) else json.dumps(schema)))
    for name, kind in (("regex", "regex"), ("grammar", "lark")):
        text = fields.text(f"{prefix}{name}", None)
        if text is not None:
            found.append((kind, text))
    choices = fields.list_of(f"{prefix}choice", fields.check_text, _MAX_CHOICES)
    if choices:
        found.append(("lark", "start: " + " | ".join(json.dumps(choice) for choice in choices)))
    return found


def _response_format(fields: Fields) -> Grammar | None:
    """Read ``response_format`` as a grammar."""
    given = fields.sub_object("response_format")
    if given is None:
        return None
    kind = given.choice("type", "text", ("text", "json_object", "json_schema", "regex"))
    grammar = None
    if kind == "json_object":
        grammar = _ANY_OBJECT
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
    return grammar


def need_grammar(model: Model, param: str) -> None:
    """Raise ApiError if the engine cannot constrain the text."""
    if "grammar" not in model.info.features:
        raise ApiError(f"{param}: the engine of this server has no grammars; leave it out", param)

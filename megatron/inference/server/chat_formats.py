"""Formats in which families of models write reasoning and calls of tools, and the parser for them.

A `Markup` is a table of tags: in each state of the text, a tag leads to another state.  Two tables,
of the reasoning and of the calls, are merged into one.  `ChatParser` reads a text that comes in
parts; the result does not depend on where the parts begin.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

from megatron.inference.server.fields import ApiError, parse_json
from megatron.inference.text import StopFinder

PartKind: TypeAlias = Literal["content", "reasoning", "call"]
Tools: TypeAlias = Mapping[str, Mapping[str, Any]]  # name -> JSON schema of the arguments

# States.  BEGIN: nothing but spaces has been written; its tags count at the begin of the text only.
# IMPLIED: the same where a text without a tag is reasoning.
# HEADER: its text decides which state follows.  BETWEEN: text around calls, which is left out.
BEGIN = "begin"
IMPLIED = "implied"
CONTENT = "content"
REASONING = "reasoning"
CALL = "call"
HEADER = "header"
BETWEEN = "between"


class Part(NamedTuple):
    """Content or reasoning with its ``text``, or a call: ``text`` is its arguments as JSON."""

    kind: PartKind
    text: str
    name: str = ""
    call_id: str = ""


class Call(NamedTuple):
    """A call in a text; ``call_id`` is empty if the model writes none."""

    name: str
    arguments: str
    call_id: str = ""


@dataclass(frozen=True)
class Markup:
    """A format: ``tags`` by state, and ``read``, which returns the calls in the text of a CALL.

    ``read`` returns None for a text that holds no call.  ``start``: state of an answer whose prompt
    does not decide it.  ``ends``: tokens that end an answer, besides the model's.  ``id_length``:
    characters of an id that the chat template accepts; 0: any number.
    """

    tags: Mapping[str, Mapping[str, str]]
    read: Callable[[str, Tools], list[Call] | None] = lambda text, tools: None
    start: str = BEGIN
    ends: tuple[str, ...] = ()
    id_length: int = 0


class ChatParser:
    """Separate reasoning, content and calls in a text that comes in parts.

    A text between tags that holds no call stays content, as does every call without ``tools``.
    """

    def __init__(self, markups: Sequence[Markup], start: str = BEGIN, tools: Tools | None = None):
        self._tags: dict[str, dict[str, str]] = {}
        for markup in markups:
            for name, tags in markup.tags.items():
                self._tags.setdefault(name, {}).update(tags)
        self._markup = markups[-1] if markups else _TRANSPARENT
        self._tools = tools
        self._waiting = ""  # of BEGIN
        self._is_after_reasoning = False
        self._raw = ""  # all text since the last content
        self._body = ""  # the text of this state
        self.state = BEGIN
        self._enter(start)

    def add(self, text: str, *, is_last: bool = False) -> list[Part]:
        """Return what is new: neighbours of one kind are one part."""
        parts: list[Part] = []
        for part in self._parts(text, is_last):
            if parts and part.kind == parts[-1].kind != "call":
                part = part._replace(text=parts.pop().text + part.text)
            parts.append(part)
        return parts

    def _parts(self, text: str, is_last: bool) -> Iterator[Part]:
        while True:
            if self.state in (BEGIN, IMPLIED):
                rest = self._begin(text, is_last)
                if rest is None:
                    return
                text = rest
            shown, tag = self._finder.add(text)
            if tag is None and is_last:
                shown += self._finder.end()
            yield from self._take(shown)
            if tag is None:
                break
            text = self._finder.rest
            yield from self._leave(tag)
        if is_last and self.state in (CALL, HEADER):
            yield from self._calls("")

    def _begin(self, text: str, is_last: bool) -> str | None:
        """Leave the begin and return the text that follows; None if more text must decide."""
        text = self._waiting + text
        tags = self._tags.get(BEGIN, {})
        bare = text.lstrip()
        tag = next((tag for tag in tags if bare.startswith(tag)), None)
        self._waiting = ""
        if tag is not None:
            self._raw = self._body = ""
            self._enter(tags[tag], tag)
            return bare[len(tag) :]
        if not is_last and any(other.startswith(bare) for other in tags):
            self._waiting = text
            return None
        text = bare if self._is_after_reasoning else text
        self._enter(REASONING if self.state == IMPLIED else CONTENT)
        return text

    def _take(self, text: str) -> Iterator[Part]:
        """Take text of the state."""
        if self.state == CONTENT and text:
            yield Part("content", text)
        elif self.state == REASONING and text:
            yield Part("reasoning", text)
        else:
            self._raw += text
            self._body += text

    def _leave(self, tag: str) -> Iterator[Part]:
        """Go on to the state behind ``tag``."""
        following = self._tags[self.state][tag]
        if self.state == CALL:
            yield from self._calls(tag)
        elif self.state == HEADER:
            following = _state_of_header(self._body)
        self._enter(following, tag)

    def _enter(self, state: str, tag: str = "") -> None:
        old = self.state
        if old in (CONTENT, REASONING):
            self._raw = self._body = ""
        self._raw += tag
        if old == HEADER:
            self._body += tag  # the name of a call is in its header
        else:
            self._body = tag if tag in _PART_OF_BODY else ""
        self._is_after_reasoning = old == REASONING
        self.state = state
        self._finder = StopFinder([*self._tags.get(state, {})])

    def _calls(self, end: str) -> Iterator[Part]:
        """Return the calls in the text of the state, or all of it as content."""
        found = None
        if self.state == CALL and self._tools is not None:
            found = self._markup.read(self._body, self._tools)
        raw = self._raw + end
        is_cut_off = self.state == HEADER and "<|" in raw
        if found is None and raw and not is_cut_off:
            yield Part("content", raw)
        for call in found or ():
            yield Part("call", call.arguments, call.name, call.call_id or self._new_id())
        self._raw = self._body = ""

    def _new_id(self) -> str:
        length = self._markup.id_length
        return secrets.token_hex(length)[:length] if length else f"call_{secrets.token_hex(12)}"


def parser_of(reasoning: Markup, calls: Markup | None, prompt: str, tools: Tools) -> ChatParser:
    """Return the parser of the answer to a rendered prompt; ``calls`` None: none is looked for."""
    markups = [reasoning] if calls is None else [reasoning, calls]
    start = _start_of(reasoning, prompt)
    if calls is not None and calls.start != BEGIN:
        start = calls.start
    return ChatParser(markups, start, None if calls is None else tools)


def json_call(text: str) -> Call | None:
    """Return the call that a JSON text holds, or None."""
    found = _json(text)
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return None
    arguments = found.get("arguments", found.get("parameters", {}))
    call_id = found.get("id")
    return Call(found["name"], _dump(arguments), call_id if isinstance(call_id, str) else "")


def markup_of_choice(name: str | None) -> Markup:
    """Return the format of an answer that is a call, or only the arguments of tool ``name``."""

    def read(text: str, tools: Tools) -> list[Call] | None:
        return _read_hermes(text, tools) if name is None else [Call(name, text)]

    return Markup({}, read, CALL)


def detect(template: str | None) -> tuple[str, str]:
    """Return the names of the parsers of calls and of reasoning for a chat template."""
    source = template or ""
    tools = [name for name, mark in _MARKS_OF_TOOLS if mark in source]
    reasoning = [name for name, mark in _MARKS_OF_REASONING if mark in source]
    return (tools[0] if len(tools) == 1 else "hermes"), (reasoning[0] if reasoning else NONE)


def _start_of(reasoning: Markup, prompt: str) -> str:
    """Return the state in which the answer to a rendered prompt begins."""
    prompt = prompt.rstrip()
    if any(prompt.endswith(tag) for tag, to in _tags(reasoning, BEGIN) if to == REASONING):
        return REASONING
    is_closed = any(prompt.endswith(tag) for tag, _ in _tags(reasoning, REASONING))
    return BEGIN if is_closed else reasoning.start


def _tags(markup: Markup, state: str) -> Iterable[tuple[str, str]]:
    return markup.tags.get(state, {}).items()


# ---- calls -------------------------------------------------------------------------------------


def _json(text: str) -> Any:
    """Return a JSON value that can be part of an answer, or None."""
    try:
        return parse_json(text.encode(), "a call")
    except ApiError:
        return None


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _read_hermes(text: str, tools: Tools) -> list[Call] | None:
    """Read ``{"name": ..., "arguments": {...}}``."""
    call = json_call(text)
    return None if call is None else [call]


def _read_llama(text: str, tools: Tools) -> list[Call] | None:
    """Read ``{"name": ..., "parameters": {...}}; {...}``."""
    calls = []
    while text := text.strip().removeprefix(";").strip():
        try:
            end = json.JSONDecoder().raw_decode(text)[1]
        except (ValueError, RecursionError):
            return None
        call = json_call(text[:end])
        if call is None:
            return None
        calls.append(call)
        text = text[end:]
    return calls or None


def _read_mistral(text: str, tools: Tools) -> list[Call] | None:
    """Read ``[{"name": ..., "arguments": {...}}]``, or ``name{...}``, or ``name[ARGS]{...}``."""
    text = text.strip()
    if text.startswith("["):
        found = _json(text)
        calls = [json_call(_dump(item)) for item in found] if isinstance(found, list) else [None]
        return None if None in calls else [call for call in calls if call is not None]
    name, brace, arguments = text.partition("{")
    found = re.search(r"\[CALL_ID\](\w+)", name)
    call_id = found[1] if found else ""
    name = name.partition("[")[0]
    return _call(name, brace + arguments, call_id)


def _read_deepseek(text: str, tools: Tools) -> list[Call] | None:
    """Read ``type SEP name ```json {...} ``` `` of V3 and R1, or ``name SEP {...}`` of V3.1."""
    name, _, arguments = text.partition(_SEP)
    fenced = re.fullmatch(r"\s*([^\n]+)\n```json\n(.*?)\n?```\s*", arguments, re.DOTALL)
    return _call(*fenced.groups()) if fenced else _call(name, arguments)


def _read_kimi(text: str, tools: Tools) -> list[Call] | None:
    """Read ``functions.name:0<|tool_call_argument_begin|>{...}``; the first part is the id."""
    call_id, _, arguments = text.partition("<|tool_call_argument_begin|>")
    name = call_id.strip().removeprefix("functions.").rpartition(":")[0]
    return _call(name, arguments, call_id.strip())


def _read_harmony(text: str, tools: Tools) -> list[Call] | None:
    """Read ``... to=functions.name ... <|message|>{...}``."""
    header, _, arguments = text.partition(_MESSAGE)
    found = _RECIPIENT.search(header)
    return _call(found[1] if found else "", arguments)


def _call(name: str, arguments: str, call_id: str = "") -> list[Call] | None:
    found = _json(arguments)
    is_call = bool(name.strip()) and isinstance(found, dict)
    return [Call(name.strip(), _dump(found), call_id)] if is_call else None


def _read_xml(pattern: str, pair: str, text: str, tools: Tools) -> list[Call] | None:
    """Read a name and pairs of parameters, whose types the tool's schema decides."""
    found = re.fullmatch(pattern, text, re.DOTALL)
    if found is None:
        return None
    name = found[1].strip()
    types = tools.get(name, {}).get("properties", {})
    arguments = {}
    for key, value in re.findall(pair, found[2], re.DOTALL):
        schema = types.get(key)
        kind = schema.get("type") if isinstance(schema, dict) else None
        parsed = None if kind == "string" else _json(value)
        is_value = parsed is not None or value.strip() == "null"
        arguments[key] = parsed if is_value and kind != "string" else value
    return [Call(name, _dump(arguments))]


def _read_qwen_coder(text: str, tools: Tools) -> list[Call] | None:
    """Read ``<function=name> <parameter=key> value </parameter> ... </function>``."""
    pair = r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>"
    return _read_xml(r"\s*<function=([^>\n]+)>(.*?)</function>\s*", pair, text, tools)


def _read_glm(text: str, tools: Tools) -> list[Call] | None:
    """Read ``name <arg_key>key</arg_key> <arg_value>value</arg_value> ...``."""
    pair = r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>"
    return _read_xml(r"\s*([^\s<{]+)\s*((?:<arg_key>.*)?)", pair, text, tools)


# ---- formats -----------------------------------------------------------------------------------

NONE = "none"
_MESSAGE = "<|message|>"
_RECIPIENT = re.compile(r"to=functions\.([^\s<]+)")
_PART_OF_BODY = ("{",)


def _state_of_header(header: str) -> str:
    """Return the state that follows the header of a message of GPT-OSS."""
    if _RECIPIENT.search(header):
        return CALL
    is_shown = "final" in header or ("commentary" in header and "to=" not in header)
    return CONTENT if is_shown else REASONING


def _deepseek(word: str) -> str:
    return f"<\uff5c{word}\uff5c>".replace(" ", "\u2581")


_SEP = _deepseek("tool sep")
_TOOL_CALL = {CONTENT: {"<tool_call>": CALL}, CALL: {"</tool_call>": CONTENT}}


def _section(begin: str, call: str, call_end: str, end: str) -> dict[str, dict[str, str]]:
    return {
        CONTENT: {begin: BETWEEN},
        BETWEEN: {call: CALL, end: CONTENT},
        CALL: {call_end: BETWEEN},
    }


_DEEPSEEK = Markup(
    _section(
        *map(_deepseek, ("tool calls begin", "tool call begin", "tool call end", "tool calls end"))
    ),
    _read_deepseek,
)
_LLAMA = Markup({BEGIN: {"{": CALL, "<|python_tag|>": CALL}}, _read_llama, ends=("<|eom_id|>",))
_ENDS_OF_MESSAGES = dict.fromkeys(("<|end|>", "<|return|>", "<|call|>", "<|start|>"), HEADER)
_HARMONY = Markup(
    {
        HEADER: {_MESSAGE: HEADER},
        **dict.fromkeys((CONTENT, REASONING, CALL), _ENDS_OF_MESSAGES),
    },
    _read_harmony,
    start=HEADER,
    ends=("<|return|>", "<|call|>"),
)
_KIMI = Markup(
    _section(
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>",
        "<|tool_call_end|>",
        "<|tool_calls_section_end|>",
    ),
    _read_kimi,
)
_CALLS_OF_MISTRAL = {"[TOOL_CALLS]": CALL}
_THINK = {BEGIN: {"<think>": REASONING}, REASONING: {"</think>": BEGIN}}
_TRANSPARENT = Markup({})

# The names are vLLM's.
TOOL_PARSERS: dict[str, Markup] = {
    "hermes": Markup(_TOOL_CALL, _read_hermes),
    "qwen3_coder": Markup(_TOOL_CALL, _read_qwen_coder),
    "qwen3_xml": Markup(_TOOL_CALL, _read_qwen_coder),
    "glm45": Markup(_TOOL_CALL, _read_glm),
    "llama3_json": _LLAMA,
    "llama4_json": _LLAMA,
    "mistral": Markup(
        {CONTENT: _CALLS_OF_MISTRAL, CALL: _CALLS_OF_MISTRAL}, _read_mistral, id_length=9
    ),
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v31": _DEEPSEEK,
    "kimi_k2": _KIMI,
    "openai": _HARMONY,
}
REASONING_PARSERS: dict[str, Markup] = {
    NONE: _TRANSPARENT,
    "deepseek_r1": Markup(_THINK, start=IMPLIED),
    "qwen3": Markup(_THINK),
    "glm45": Markup(_THINK),
    "kimi_k2": Markup(_THINK),
    "mistral": Markup({BEGIN: {"[THINK]": REASONING}, REASONING: {"[/THINK]": BEGIN}}),
    "openai_gptoss": _HARMONY,
}
_MARKS_OF_TOOLS = (
    ("openai", "<|channel|>"),
    ("deepseek_v3", _deepseek("tool calls begin")),
    ("kimi_k2", "<|tool_calls_section_begin|>"),
    ("mistral", "[TOOL_CALLS]"),
    ("glm45", "<arg_key>"),
    ("qwen3_coder", "<function="),
    ("llama3_json", '"parameters": dictionary of argument name'),
)
_MARKS_OF_REASONING = (
    ("openai_gptoss", "<|channel|>"),
    ("mistral", "[THINK]"),
    ("qwen3", "</think>"),
)

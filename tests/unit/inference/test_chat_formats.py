"""Reasoning and calls in the formats of model families, in parts of any size."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from pathlib import Path

import pytest

from megatron.core.chat_templates import compile_template
from megatron.inference.server.chat_formats import (
    CALL,
    REASONING_PARSERS,
    TOOL_PARSERS,
    ChatParser,
    detect,
    markup_of_choice,
    parser_of,
)
from tests.support import chat_templates

HERMES = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
TOOLS = {"f": {"properties": {"city": {"type": "string"}, "x": {"type": "integer"}}}}
OSLO = '{"city": "Oslo"}'
F_OSLO = ("call", OSLO, "f")
HARMONY_CALL = " to=functions.f <|constrain|>json<|message|>" + OSLO


def deepseek(text: str) -> str:
    """Write DeepSeek's tags with their special characters."""
    for word in ("calls_begin", "calls_end", "call_begin", "call_end", "sep"):
        name = f"tool_{word}".replace("_", "\u2581")
        text = text.replace(f"<{word}>", f"<\uff5c{name}\uff5c>")
    return text


V3 = deepseek(f"<call_begin>function<sep>f\n```json\n{OSLO}\n```<call_end>")

# Parser of calls, of reasoning, end of the prompt, text, parts.
CASES = [
    ("hermes", "none", "", "no call", [("content", "no call", "")]),
    (
        "hermes",
        "none",
        "",
        f"before {HERMES} between {HERMES}after",
        [
            ("content", "before ", ""),
            ("call", '{"x": 1}', "f"),
            ("content", " between ", ""),
            ("call", '{"x": 1}', "f"),
            ("content", "after", ""),
        ],
    ),
    ("hermes", "none", "", HERMES[: -len("</tool_call>")], [("call", '{"x": 1}', "f")]),
    *(
        ("hermes", "none", "", text, [("content", text, "")])
        for text in (
            "<tool_call>text</tool_call>!",
            "<tool_call>[1]",
            "a <tool_c",
            " <think>not a model that reasons</think>",
            '<tool_call>{"name": 5}</tool_call>',
            # Values that no answer can have.
            '<tool_call>{"name": "f", "arguments": "\\ud800"}</tool_call>',
            '<tool_call>{"name": "f", "arguments": NaN}</tool_call>',
            '<tool_call>{"name": "f", "arguments": ' + "[" * 900 + "]" * 900 + "}</tool_call>",
        )
    ),
    (
        "hermes",
        "qwen3",
        "",
        f"<think>\nA <tool_call>?\n</think>\n\nYes: {HERMES}",
        [
            ("reasoning", "\nA <tool_call>?\n", ""),
            ("content", "Yes: ", ""),
            ("call", '{"x": 1}', "f"),
        ],
    ),
    ("hermes", "qwen3", "", "The tag <think> is", [("content", "The tag <think> is", "")]),
    ("hermes", "qwen3", "<think>\n", "A", [("reasoning", "A", "")]),
    ("hermes", "qwen3", "<think>\n\n</think>\n\n", "A", [("content", "A", "")]),
    ("hermes", "deepseek_r1", "", "A</think>B", [("reasoning", "A", ""), ("content", "B", "")]),
    ("hermes", "deepseek_r1", "", "<think>A</think>", [("reasoning", "A", "")]),
    ("hermes", "deepseek_r1", "</think>", "A", [("content", "A", "")]),
    (
        "qwen3_coder",
        "none",
        "",
        "<tool_call>\n<function=f>\n<parameter=city>\n12\n</parameter>\n<parameter=x>\n3\n"
        "</parameter>\n</function>\n</tool_call>",
        [("call", '{"city": "12", "x": 3}', "f")],
    ),
    (
        "glm45",
        "glm45",
        "",
        "<think>A</think>\n<tool_call>f\n<arg_key>city</arg_key>\n<arg_value>New York</arg_value>\n"
        "<arg_key>x</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
        [("reasoning", "A", ""), ("call", '{"city": "New York", "x": 3}', "f")],
    ),
    (
        "llama3_json",
        "none",
        "",
        '{"name": "f", "parameters": {"city": "a; {b}"}}; {"name": "f", "parameters": {}}',
        [("call", '{"city": "a; {b}"}', "f"), ("call", "{}", "f")],
    ),
    (
        "llama3_json",
        "none",
        "",
        '\n<|python_tag|>{"name": "f", "parameters": ' + OSLO + "}",
        [F_OSLO],
    ),
    *(
        ("llama3_json", "none", "", text, [("content", text, "")])
        for text in ('{"a": 1}', 'Like {"name": "f"}', "<|python_tag|>print(1)", '{"name": "f"')
    ),
    (
        "mistral",
        "mistral",
        "",
        f"[THINK]A[/THINK]B[TOOL_CALLS]f[ARGS]{OSLO}[TOOL_CALLS]f{OSLO}",
        [("reasoning", "A", ""), ("content", "B", ""), F_OSLO, F_OSLO],
    ),
    (
        "mistral",
        "none",
        "",
        '[TOOL_CALLS] [{"name": "f", "arguments": ' + OSLO + "}]",
        [F_OSLO],
    ),
    ("mistral", "none", "", "[TOOL_CALLS] [1]", [("content", "[TOOL_CALLS] [1]", "")]),
    (
        "deepseek_v3",
        "deepseek_r1",
        "",
        deepseek(f"A</think>\n\nB<calls_begin>{V3}\n{V3}<calls_end>"),
        [("reasoning", "A", ""), ("content", "B", ""), F_OSLO, F_OSLO],
    ),
    (
        "deepseek_v31",
        "none",
        "",
        deepseek(f"<calls_begin><call_begin>f<sep>{OSLO}<call_end><calls_end>"),
        [F_OSLO],
    ),
    (
        "kimi_k2",
        "none",
        "",
        "A<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0"
        f"<|tool_call_argument_begin|>{OSLO}<|tool_call_end|><|tool_calls_section_end|>",
        [("content", "A", ""), F_OSLO],
    ),
    *(
        ("openai", "openai_gptoss", "<|start|>assistant", text, parts)
        for text, parts in (
            (
                "<|channel|>analysis<|message|>A<|end|><|start|>assistant<|channel|>commentary"
                + HARMONY_CALL,
                [("reasoning", "A", ""), F_OSLO],
            ),
            (
                "<|channel|>commentary<|message|>A<|end|><|start|>assistant"
                "<|channel|>final<|message|>B<|return|>",
                [("content", "AB", "")],
            ),
            (f" to=functions.f<|channel|>commentary json<|message|>{OSLO}<|call|>", [F_OSLO]),
            ("<|channel|>analysis<|message|>A", [("reasoning", "A", "")]),
            ("<|channel|>analysis to=browser.open code<|message|>{}", [("reasoning", "{}", "")]),
            ("<|channel|>fin", []),
            ("A text", [("content", "A text", "")]),
        )
    ),
]


def _read(parser: ChatParser, text: str, size: int) -> list[tuple[str, str, str]]:
    """Return the parts of a text that comes in pieces of ``size`` characters."""
    found: list[tuple[str, str, str]] = []
    for at in range(0, len(text), size):
        for kind, new, name, _ in parser.add(text[at : at + size], is_last=at + size >= len(text)):
            if found and kind == found[-1][0] != "call":
                new = found.pop()[1] + new
            found.append((kind, new, name))
    return found


@pytest.mark.feature("Serving: reasoning and calls of tools in the formats of eight model families")
@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(("calls", "reasoning", "prompt", "text", "parts"), CASES)
def test_a_text_has_the_same_parts_in_pieces_of_any_size(
    calls, reasoning, prompt, text, parts, size
):
    parser = parser_of(REASONING_PARSERS[reasoning], TOOL_PARSERS[calls], prompt, TOOLS)
    assert _read(parser, text, size) == parts


PUBLISHED = (
    "qwen2_5 qwen3 qwen3_5_think qwen3_6 qwen3_instruct_2507 qwen3_vl nemotron_3_nano glm4moe "
    "gptoss deepseekv3 llama3_1 llama3_2"
).split()
END = re.compile(r"\s*<(\uff5cend\u2581of.*|\|(im_end|eot_id|call|return)\|>)\s*$")


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_a_published_template_writes_is_read_back(name):
    """TRL's package has copies of the templates."""
    package = importlib.util.find_spec("trl")
    if package is None or package.origin is None:
        pytest.skip("could not find trl")
    folder = Path(package.origin).parent / "chat_templates"
    source = (folder / f"{name}.jinja").read_text()
    template = compile_template(source, "a test")
    calls, reasoning = detect(source)
    assert calls != "hermes" or "qwen" in name
    arguments = {"city": 'New "Y" {ork}', "x": 3}
    given = json.dumps(arguments) if name == "deepseekv3" else arguments
    call = {"type": "function", "id": "a", "function": {"name": "f", "arguments": given}}
    user = {"role": "user", "content": "Hi"}
    described = {"description": "d", "properties": {"city": {"type": "string"}}}
    tool = {"name": "f", "description": "d", "parameters": {"type": "object", **described}}
    tools = [{"type": "function", "function": tool}]
    has_thought = reasoning != "none" and name != "deepseekv3"
    for content, number in (("A", 0), ("", 1)):
        answer = {"role": "assistant", "content": content}
        answer |= {"tool_calls": [call]} if number else {}
        if has_thought and name != "gptoss":
            answer["reasoning_content"] = "Thought"
        prompt = template.render(messages=[user], tools=tools, add_generation_prompt=True)
        whole = template.render(messages=[user, answer], tools=tools)
        before = os.path.commonprefix((prompt, whole))
        before = before.removesuffix("<") if name == "deepseekv3" else before
        text = END.sub("", whole[len(before) :])
        parser = parser_of(REASONING_PARSERS[reasoning], TOOL_PARSERS[calls], before, TOOLS)
        parts = _read(parser, text, 5)
        found = [json.loads(new) for kind, new, _ in parts if kind == "call"]
        assert found == [arguments] * number, text
        assert "".join(new for kind, new, _ in parts if kind == "content").strip() == content
        thoughts = "".join(new for kind, new, _ in parts if kind == "reasoning").strip()
        assert thoughts == ("Thought" if "Thought" in whole else ""), text


def test_calls_stay_text_where_no_tools_are_given():
    for calls, text in (("hermes", HERMES), ("mistral", f"[TOOL_CALLS]f{OSLO}")):
        assert TOOL_PARSERS[calls].tags
        parser = parser_of(REASONING_PARSERS["qwen3"], None, "", TOOLS)
        assert _read(parser, text, 3) == [("content", text, "")]


@pytest.mark.parametrize(
    ("name", "text", "parts"),
    [
        ("f", OSLO, [F_OSLO]),
        (None, '{"name": "f", "arguments": ' + OSLO + "}", [F_OSLO]),
        (None, "[1]", [("content", "[1]", "")]),
    ],
)
def test_an_answer_that_must_be_a_call_is_one(name, text, parts):
    assert _read(ChatParser([markup_of_choice(name)], CALL, {}), text, 3) == parts


def test_ids_of_calls_are_those_that_the_template_accepts():
    def call_id(calls: str, text: str) -> str:
        parser = parser_of(REASONING_PARSERS["none"], TOOL_PARSERS[calls], "", TOOLS)
        (part,) = parser.add(text, is_last=True)
        return part.call_id

    assert call_id("hermes", HERMES).startswith("call_")
    mistral = [call_id("mistral", f"[TOOL_CALLS]f{OSLO}") for _ in range(2)]
    assert [len(one) for one in mistral] == [9, 9]
    assert all(one.isalnum() for one in mistral)
    assert mistral[0] != mistral[1]
    assert call_id("mistral", f"[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{OSLO}") == "abcdefghi"


@pytest.mark.parametrize(
    ("template", "names"),
    [
        (None, ("hermes", "none")),
        (chat_templates.CHATML, ("hermes", "none")),
        (chat_templates.QWEN3, ("hermes", "qwen3")),
        (
            '{"name": function name, "parameters": dictionary of argument name and its value}.',
            ("llama3_json", "none"),
        ),
        ("{{ '[TOOL_CALLS]' }}", ("mistral", "none")),
        (deepseek("{{ '<think>' }}</think><calls_begin>"), ("deepseek_v3", "qwen3")),
        ("<|start|>assistant<|channel|>final", ("openai", "openai_gptoss")),
        ("[TOOL_CALLS] and <|channel|>", ("hermes", "openai_gptoss")),
    ],
)
def test_a_chat_template_decides_the_parsers(template, names):
    assert detect(template) == names

"""Chat templates of Hugging Face: where their files are, and how jinja2's sandbox compiles them.

The process that renders untrusted templates imports this module: it imports no torch.
"""

from __future__ import annotations

import datetime
import json
import os
from typing import Any

from megatron.core.config.errors import ConfigError
from megatron.core.optional import require
from megatron.core.text_files import read_text

_NEEDED = "a file of jinja text"


def compile_template(
    source: str, wanted_by: str, generation_marks: tuple[str, str] = ("", "")
) -> Any:
    """Return a template with the functions that Hugging Face's chat templates call.

    ``generation_marks`` are written before and after the text of each ``{% generation %}`` block.
    """
    jinja2 = require("jinja2", wanted_by)
    sandbox = require("jinja2.sandbox", wanted_by)
    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _generation_block(wanted_by, generation_marks)],
    )
    environment.filters["tojson"] = _to_json

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(str(message))

    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment.from_string(source)


def template_errors(wanted_by: str) -> tuple[type[BaseException], ...]:
    """Return the exception types that compiling and rendering a template can raise."""
    return (
        require("jinja2", wanted_by).TemplateError,
        ArithmeticError,
        AttributeError,
        LookupError,
        MemoryError,
        RecursionError,
        TypeError,
        ValueError,
    )


def read_chat_template(
    file: str | None, tokenizer_path: str | None
) -> tuple[str | None, dict[str, str]]:
    """Return the template's source, or None, and the texts of special tokens.

    ``file``: --chat-template.  Else the folder of the tokenizer has it: chat_template.jinja or
    ``chat_template`` in tokenizer_config.json.  Raises ConfigError for a file that cannot be read.
    """
    folder = tokenizer_path or ""
    if folder and not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    config = _tokenizer_config(folder) if folder else {}
    tokens = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        token = config.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            tokens[name] = text
    if file is not None:
        return read_text(file, f"--chat-template {file}", ConfigError, _NEEDED), tokens
    jinja = os.path.join(folder, "chat_template.jinja")
    if folder and os.path.isfile(jinja):
        return read_text(jinja, jinja, ConfigError, _NEEDED), tokens
    found = config.get("chat_template")
    if isinstance(found, list):  # several, with names
        named = {t["name"]: t["template"] for t in found if isinstance(t, dict) and len(t) == 2}
        found = named.get("default")
    return (found if isinstance(found, str) else None), tokens


def open_last_message(text: str, content: str) -> str | None:
    """Return a rendered conversation up to the end of its last ``content``, which then goes on.

    Return None if the template has not written it.
    """
    at = text.rfind(content.strip())
    if at < 0 or not content.strip():
        return None
    whole = content.lstrip()  # with its spaces at the end, if the template keeps them
    return text[:at] + (whole if text.startswith(whole, at) else content.strip())


def _generation_block(wanted_by: str, marks: tuple[str, str]) -> type:
    """Return the jinja2 extension of ``{% generation %} ... {% endgeneration %}``."""
    nodes = require("jinja2.nodes", wanted_by)

    class Generation(require("jinja2.ext", wanted_by).Extension):  # type: ignore[misc]
        tags = {"generation"}

        def parse(self, parser: Any) -> list[Any]:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            begin, end = (
                nodes.Output([nodes.TemplateData(mark)], lineno=line) if mark else None
                for mark in marks
            )
            return [node for node in (begin, *body, end) if node is not None]

    return Generation


def _to_json(value: Any, ensure_ascii: bool = False, **form: Any) -> str:
    """Return JSON; ``form``: indent, separators and sort_keys."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **form)


def _tokenizer_config(folder: str) -> dict[str, Any]:
    path = os.path.join(folder, "tokenizer_config.json")
    if not os.path.isfile(path):
        return {}
    try:
        found = json.loads(read_text(path, path, ConfigError))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no JSON: {error}; fetch it again") from None
    return found if isinstance(found, dict) else {}

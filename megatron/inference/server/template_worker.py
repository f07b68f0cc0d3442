"""The process that renders chat templates.  A template comes from a tokenizer's folder: no trust.

It runs in jinja2's sandbox, in a process with limits.  The first answer says whether the template
compiles; then each object of variables is answered.  Answers are JSON lists: whether it succeeded,
and the text or the reason.
"""

from __future__ import annotations

import json
import socket

from megatron.core.chat_templates import compile_template, template_errors
from megatron.core.limited_processes import (
    Limits,
    Work,
    fork_for_each_connection,
    receive,
    send,
)

_MAX_TEXT = 16 << 20  # characters of a rendered prompt
_WANTED_BY = "the server"


def main(control: socket.socket) -> None:
    """Render a template, which is the setup, a JSON string."""
    fork_for_each_connection(control, _prepare)


def _prepare(setup: bytes) -> Work:
    source = json.loads(setup)
    errors = template_errors(_WANTED_BY)
    compile_template("", _WANTED_BY)  # imports what templates need

    def render(connection: socket.socket, limits: Limits) -> None:
        problem = ""
        template = None
        with limits.time():  # jinja2 computes constants here
            try:
                template = compile_template(source, _WANTED_BY)
            except errors as error:
                problem = _reason(error)
        send(connection, json.dumps([not problem, problem]).encode())
        while template is not None:
            variables = json.loads(receive(connection))
            with limits.time():
                try:
                    text = template.render(**variables)
                    is_short = len(text) <= _MAX_TEXT
                    found = (is_short, text if is_short else "it is too long")
                except errors as error:
                    found = (False, _reason(error))
            send(connection, json.dumps(found).encode())

    return render


def _reason(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:500]}" if text else type(error).__name__

"""The process that renders chat templates.  A template comes from a tokenizer's folder: no trust.

It runs in jinja2's sandbox, in a process with limited memory that a timer ends.  This module
imports of this project only what imports little, so that the process starts at once.
"""

from __future__ import annotations

import json
import resource
import signal
from multiprocessing.connection import Connection

from megatron.core.chat_templates import compile_template, template_errors

TIME_LIMIT_S = 2.0  # of one rendering
_MEMORY_LIMIT_BYTES = 256 << 20  # above what the process needs to start
_MAX_TEXT = 16 << 20  # characters of a rendered prompt
_WANTED_BY = "the server"


def serve(connection: Connection, source: str) -> None:
    """Render the template with each object of variables that arrives, until the other end closes.

    The answers are JSON lists: whether it succeeded, and the text or the reason.
    """
    template = None
    problem = ""
    errors = template_errors(_WANTED_BY)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the front end ends this process
    _limit_memory()
    # The default action of SIGALRM ends the process, also in code that runs for long in C.
    signal.setitimer(signal.ITIMER_REAL, TIME_LIMIT_S)  # jinja2 computes constants here
    try:
        template = compile_template(source, _WANTED_BY)
    except errors as error:
        problem = _reason(error)
    connection.send_bytes(json.dumps([not problem, problem]).encode())
    signal.setitimer(signal.ITIMER_REAL, 0)
    while template is not None:
        try:
            variables = json.loads(connection.recv_bytes())
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_REAL, TIME_LIMIT_S)
        try:
            text = template.render(**variables)
            found = (len(text) <= _MAX_TEXT, text if len(text) <= _MAX_TEXT else "it is too long")
        except errors as error:
            found = (False, _reason(error))
        signal.setitimer(signal.ITIMER_REAL, 0)
        connection.send_bytes(json.dumps(found).encode())


def _reason(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:500]}" if text else type(error).__name__


def _limit_memory() -> None:
    with open("/proc/self/statm", encoding="ascii") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    limit = used + _MEMORY_LIMIT_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

"""The process that tokenizes and decodes long texts of requests.

Most tokenizers hold the GIL for all of a text: in the front end, one long prompt would stop every
other request.
"""

from __future__ import annotations

import json
import socket
from typing import Any

from megatron.core.config.errors import ConfigError
from megatron.core.limited_processes import (
    Limits,
    Work,
    fork_for_each_connection,
    receive,
    send,
)
from megatron.training.process.user_code import problems_of_imports
from megatron.training.tokenizer import MegatronTokenizer, TokenizerSpec, create_tokenizer

TIME_LIMIT_S = 10.0  # of the processor, for the texts of one request
_MEMORY_LIMIT_BYTES = 2 << 30
READ_ERRORS = (ValueError, KeyError)  # of tokenizers, for a text that they cannot read


def main(control: socket.socket) -> None:
    """Tokenize with the tokenizer of the setup, JSON of `setup_of`."""
    fork_for_each_connection(control, _prepare, TIME_LIMIT_S, _MEMORY_LIMIT_BYTES)


def setup_of(tokenizer: dict[str, Any], modules: tuple[str, ...]) -> bytes:
    """Return the setup: fields of `TokenizerSpec`, and user modules that may register some."""
    return json.dumps([tokenizer, modules]).encode()


def apply(tokenizer: MegatronTokenizer, kind: str, items: list[Any]) -> list[Any]:
    """Return ids of texts (``tokenize``, ``tokenize_plain``), or texts of ids (``detokenize``)."""
    function = getattr(tokenizer, kind)
    is_text = kind == "detokenize"
    return [function(item) if is_text else list(function(item)) for item in items]


def _prepare(setup: bytes) -> Work:
    spec, modules = json.loads(setup)
    ConfigError.raise_for(problems_of_imports(modules))
    tokenizer = create_tokenizer(TokenizerSpec(**spec))

    def work(connection: socket.socket, limits: Limits) -> None:
        kind, items = json.loads(receive(connection))
        with limits.time():
            try:
                found = [True, apply(tokenizer, kind, items)]
            except READ_ERRORS as error:
                found = [False, str(error)]
            answer = json.dumps(found).encode()
        send(connection, answer)

    return work

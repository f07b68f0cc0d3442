"""The processes that compile grammars and follow them.  A grammar comes from a client: no trust.

One process has one grammar; its first message is [kind, text] as JSON.  Each further message, of
`STEP`, is about one text: a token that continues it, or `NEW` or `DROP`.  The answer to all but
`DROP` is the number of the text, whether it can go on, and the tokens that may follow (bit
t % 32 of int32 word t // 32) or the reason why none can.

llguidance bounds the work of most steps (`_LIMITS`).  Where it does not, the limits of the process
do (`megatron.core.limited_processes`).
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Any

from megatron.core.limited_processes import Limits, Work, fork_for_each_connection, receive, send
from megatron.core.optional import require

STEP = struct.Struct("<qi")  # number of a text, and a token
ANSWER = struct.Struct("<q?")
# In place of a token: begin a text, or forget it.
NEW = -1
DROP = -2
WANTED_BY = "a grammar in a request"

_LONGEST_FORCED = 1 << 13  # bytes that follow without a choice; each step tokenizes them again
# States take 2 kB each.
_LIMITS = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 10_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}
_SPACES = r"[ \n]{1,40}"  # between tokens of JSON: a model must not write spaces for ever


def main(control: socket.socket) -> None:
    """Serve a vocabulary, which is the setup: the end-of-document token and text of each token."""
    fork_for_each_connection(control, _prepare)


def pack_vocabulary(tokens: Sequence[bytes | None], eod: int) -> bytes:
    """Return the setup of these processes; see `megatron.core.inference.grammar.Grammars`."""
    texts = [None if token is None else token.decode("latin-1") for token in tokens]
    return json.dumps([eod, texts]).encode()


def _prepare(setup: bytes) -> Work:
    eod, texts = json.loads(setup)
    compiler = _Compiler([None if text is None else text.encode("latin-1") for text in texts], eod)

    def follow(connection: socket.socket, limits: Limits) -> None:
        kind, text = json.loads(receive(connection))
        with limits.one_of_few(), limits.time():
            start, problem = compiler.compile(kind, text)
        matchers: dict[int, Any] = {}
        while True:
            number, token = STEP.unpack(receive(connection))
            if token == DROP:
                matchers.pop(number, None)
                continue
            words = b""
            reason = problem
            if start is not None:
                with limits.time():
                    if token == NEW:
                        matchers[number] = start.deep_copy()
                    else:
                        matchers[number].consume_token(token)
                    words, reason = compiler.allowed(matchers[number])
            send(connection, ANSWER.pack(number, not reason) + (reason.encode() or words))

    return follow


class _Compiler:
    def __init__(self, tokens: Sequence[bytes | None], eod: int) -> None:
        self._library = require("llguidance", WANTED_BY)
        self._vocabulary = _Vocabulary(tokens, eod)
        wrapper = self._library.TokenizerWrapper(self._vocabulary)
        self._tokenizer = self._library.LLTokenizer(wrapper, eos_token=eod)
        self._vocabulary.tokenize = self._tokenizer.greedy_tokenize

    def compile(self, kind: str, text: str) -> tuple[Any, str]:
        """Return a matcher at the start of a grammar, or None and the reason."""
        of = self._library.LLMatcher
        try:
            if kind == "json_schema":
                how = {"whitespace_pattern": _SPACES} if text.lstrip().startswith("{") else None
                grammar = of.grammar_from_json_schema(text, overrides=how)
            elif kind == "lark":
                grammar = of.grammar_from_lark(text)
            else:
                grammar = of.grammar_from_regex(text)
            limits = self._library.LLParserLimits(**_LIMITS)
            state = of(self._tokenizer, grammar, log_level=0, limits=limits)
        except (ValueError, RecursionError) as error:  # not JSON, not Unicode, or nested too deeply
            return None, f"{kind} grammar: {_reason(str(error))}"
        reason = _reason(state.get_error())
        if not reason:  # most errors are found with the first token
            reason = self.allowed(state.deep_copy())[1]
        return (None, f"{kind} grammar: {reason}") if reason else (state, "")

    def allowed(self, state: Any) -> tuple[bytes, str]:
        """Return the mask of the tokens that may follow, or nothing and the reason."""
        self._vocabulary.has_long_text = False
        words: bytes = state.compute_bitmask()
        if self._vocabulary.has_long_text:
            return b"", f"the grammar forces more than {_LONGEST_FORCED} bytes in sequence"
        return words, _reason(state.get_error()) if state.is_error() else ""


class _Vocabulary:
    """The tokenizer as llguidance expects one; it tokenizes bytes that a grammar forces."""

    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes | None], eod: int) -> None:
        self.tokens = [token or b"" for token in tokens]  # empty ones are never allowed
        self.tokens[eod] = b"<eod>"
        self.eos_token_id = eod
        self.special_token_ids = [eod]
        self.tokenize: Callable[[str], list[int]] | None = None
        self.has_long_text = False

    def __call__(self, text: bytes) -> list[int]:
        self.has_long_text |= len(text) > _LONGEST_FORCED
        return self.tokenize(text.decode()) if self.tokenize else []


def _reason(text: str) -> str:
    """Return the library's message without dumps of its state, on one line of limited length."""
    if text.startswith("NoExtension"):
        return "no text of this vocabulary fits"
    text = text.encode("utf-8", "backslashreplace").decode()
    return " ".join(text.split("\n<state>")[0].replace("<non-verbose/>", "").split())[:300]

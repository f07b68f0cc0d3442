"""Constraints on generated text: JSON schema, regular expression, Lark grammar, list of choices.

llguidance (extra "serve") follows the bytes of the tokens through the grammar.  Rank 0 asks a
matcher before each step which tokens may follow, and reports each token that was chosen.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.core.inference.paged_engine.request import RequestError
from megatron.core.optional import require

_LARGEST_TEXT = 1 << 16  # characters
_LONGEST_FORCED = 1 << 13  # bytes that follow without a choice; each step tokenises them again
_KEPT_GRAMMARS = 16  # compiled ones, for requests that share a grammar
# A step may take some 20 ms of the host; states take 2 kB each.
_LIMITS = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 10_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}
_SPACES = r"[ \n]{1,40}"  # between tokens of JSON: a model must not write spaces for ever


class GrammarMatcher:
    """Where one text stands in its grammar: the `Matcher` of a request."""

    def __init__(self, state: Any, vocabulary: _Vocabulary) -> None:
        self._state = state
        self._vocabulary = vocabulary
        self._num_words = -(-len(vocabulary.tokens) // 32)
        self.error = ""  # why the text cannot go on: the grammar needs more work than a step allows

    def allowed(self) -> npt.NDArray[np.int32]:
        """Return which tokens may follow: token t is bit t % 32 of word t // 32.

        A complete text allows the end-of-document token.  No token is allowed after an error.
        """
        self._vocabulary.has_long_text = False
        words = np.frombuffer(self._state.compute_bitmask(), dtype=np.int32)
        if self._vocabulary.has_long_text:
            self.error = f"the grammar forces more than {_LONGEST_FORCED} bytes in sequence"
        elif self._state.is_error():
            self.error = _reason(self._state.get_error())
        return np.zeros(self._num_words, np.int32) if self.error else words

    def accept(self, token: int) -> None:
        """Advance by an allowed token; after another one no token is allowed."""
        self._state.consume_token(token)


class Grammars:
    """Compiles grammars for a vocabulary.

    ``tokens``: bytes of each token id; None: a special token, which no text has.  ``eod``: ends a
    text.  Raises MissingDependency without llguidance.
    """

    def __init__(self, tokens: Sequence[bytes | None], eod: int) -> None:
        self._library = require("llguidance", "a grammar in a request")
        self._vocabulary = _Vocabulary(tokens, eod)
        wrapper = self._library.TokenizerWrapper(self._vocabulary)
        self._tokenizer = self._library.LLTokenizer(wrapper, eos_token=eod)
        self._vocabulary.tokenize = self._tokenizer.greedy_tokenize
        self._compiled = lru_cache(maxsize=_KEPT_GRAMMARS)(self._compile)

    def matcher(self, kind: str, text: str) -> GrammarMatcher:
        """Return a matcher at the start of a grammar.

        ``kind``: "json_schema", "regex", "lark", or "choice", whose text is a JSON list of strings.
        Raises RequestError with the reason if no text fits or the grammar is too large.
        """
        if len(text) > _LARGEST_TEXT:
            size = f"grammar of {len(text)} characters"
            raise RequestError(f"{size}: at most {_LARGEST_TEXT} are supported", "grammar")
        return GrammarMatcher(self._compiled(kind, text).deep_copy(), self._vocabulary)

    def _compile(self, kind: str, text: str) -> Any:
        of = self._library.LLMatcher
        try:
            if kind == "json_schema":
                how = {"whitespace_pattern": _SPACES} if text.lstrip().startswith("{") else None
                grammar = of.grammar_from_json_schema(text, overrides=how)
            elif kind == "regex":
                grammar = of.grammar_from_regex(text)
            elif kind == "lark":
                grammar = of.grammar_from_lark(text)
            elif kind == "choice":
                grammar = of.grammar_from_regex(_one_of(text))
            else:
                kinds = "json_schema, regex, lark or choice"
                raise RequestError(f"grammar of kind {kind!r}: give {kinds}", "grammar")
            limits = self._library.LLParserLimits(**_LIMITS)
            state = of(self._tokenizer, grammar, log_level=0, limits=limits)
        except RequestError:
            raise
        except (ValueError, RecursionError) as error:  # not JSON, not Unicode, or nested too deeply
            raise RequestError(f"{kind} grammar: {_reason(str(error))}", "grammar") from error
        reason = _reason(state.get_error())
        if not reason:  # most errors are found with the first token
            first = GrammarMatcher(state.deep_copy(), self._vocabulary)
            first.allowed()
            reason = first.error
        if reason:
            raise RequestError(f"{kind} grammar: {reason}", "grammar")
        return state


class _Vocabulary:
    """The tokenizer as llguidance expects one; it tokenises bytes that a grammar forces."""

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


def _one_of(text: str) -> str:
    """Return a regular expression for the strings of a JSON list."""
    choices = json.loads(text)
    if not isinstance(choices, list) or not all(isinstance(c, str) for c in choices):
        raise RequestError("choice grammar: give a JSON list of strings", "grammar")
    if not choices:
        raise RequestError("choice grammar: give at least one string", "grammar")
    return "|".join("".join(_literal(c) for c in choice) for choice in choices)


def _literal(character: str) -> str:
    if character.isascii() and character.isalnum():
        return character
    return f"\\x{{{ord(character):x}}}"


def _reason(text: str) -> str:
    """Return the library's message without dumps of its state, on one line of limited length."""
    if text.startswith("NoExtension"):
        return "no text of this vocabulary fits"
    return " ".join(text.split("\n<state>")[0].replace("<non-verbose/>", "").split())[:300]

"""Constraints on generated text: a JSON schema or a regular expression.

llguidance (extra "serve") follows the bytes of the tokens through the grammar, in processes with
limits (`megatron.core.inference.grammar_worker`).  Rank 0 tells them each token that was chosen,
and asks before the next step which tokens may follow.  It waits for a moment only: a text whose
answer has not come is left out of the step.
"""

from __future__ import annotations

import json
import select
import time
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from itertools import count

import numpy as np
import numpy.typing as npt

from megatron.core.inference import grammar_worker
from megatron.core.inference.grammar_worker import (
    ANSWER,
    DROP,
    NEW,
    STEP,
    WANTED_BY,
    pack_vocabulary,
)
from megatron.core.inference.paged_engine.request import QueueFullError, RequestError
from megatron.core.limited_processes import LENGTH, LimitedProcesses, Start, exceeded, spawn
from megatron.core.optional import require

_LARGEST_TEXT = 1 << 16  # characters
_KINDS = ("json_schema", "regex", "lark")
_MOST_GRAMMARS = 128  # in use at the same time: each has a process
_KEPT_GRAMMARS = 16  # of the last requests, for later requests that have the same grammar
_WAIT_S = 0.005  # of a step, for the answer to a token
_PATIENCE_S = 60.0  # with a process that is stopped, or has no processor
_READ_BYTES = 1 << 20
_NOTHING: npt.NDArray[np.int32] = np.empty(0, np.int32)


class GrammarMatcher:
    """Where the text of one request stands in its grammar."""

    def __init__(self, process: _GrammarProcess, number: int, num_words: int) -> None:
        self._process = process
        self._number = number
        self._none = np.zeros(num_words, np.int32)
        self._words: npt.NDArray[np.int32] | None = None  # None: an answer has not come
        self._num_asked = 1
        self._due = time.monotonic()  # no wait: the grammar is compiled before the first answer
        self.error = ""  # why the text cannot go on
        process.ask(number, NEW)

    def is_ready(self) -> bool:
        """Return whether `allowed` returns at once; wait for a moment if it was asked just now."""
        if self._words is None:
            self._wait(self._due - time.monotonic())
        return self._words is not None

    def allowed(self) -> npt.NDArray[np.int32]:
        """Return which tokens may follow: token t is bit t % 32 of word t // 32.

        A complete text allows the end-of-document token.  No token is allowed after an error.
        """
        while self._words is None:
            self._wait(_PATIENCE_S)
        return self._words

    def accept(self, token: int) -> None:
        """Advance by an allowed token; after another one no token is allowed."""
        if self.error:
            return
        self._words = None
        self._num_asked += 1
        self._due = time.monotonic() + _WAIT_S
        self._process.ask(self._number, token)

    def take(self, words: npt.NDArray[np.int32], error: str) -> None:
        """Take an answer of the process."""
        self._num_asked -= 1
        self.error = error
        if error:
            self._words = self._none
        elif self._num_asked == 0:
            self._words = words

    def _wait(self, seconds: float) -> None:
        """Read answers until this text has one; return after some seconds even if it has none."""
        end = time.monotonic() + seconds
        self._process.exchange(0)
        while self._words is None and (left := end - time.monotonic()) > 0:
            self._process.exchange(left)
        if self._words is None and time.monotonic() - self._due > _PATIENCE_S:
            self._process.give_up()


class Grammars:
    """Compiles grammars for a vocabulary.

    ``tokens``: bytes of each token id; None: a special token, which no text has.  ``eod``: ends a
    text.  ``start``: starts the process that forks a process for each grammar.
    Raises MissingDependency without llguidance.
    """

    def __init__(self, tokens: Sequence[bytes | None], eod: int, start: Start = spawn) -> None:
        require("llguidance", WANTED_BY)
        self._num_words = -(-len(tokens) // 32)
        self._processes = LimitedProcesses(grammar_worker.main, pack_vocabulary(tokens, eod), start)
        self._processes.start()
        self._in_use: weakref.WeakValueDictionary[tuple[str, str], _GrammarProcess] = (
            weakref.WeakValueDictionary()
        )
        self._kept: deque[_GrammarProcess] = deque(maxlen=_KEPT_GRAMMARS)

    def matcher(self, kind: str, text: str) -> GrammarMatcher:
        """Return a matcher at the start of a grammar.

        ``kind``: "json_schema", "regex" or "lark" (llguidance's form of Lark's grammars).
        The matcher has an ``error`` as soon as it is ready if no text fits, or if the grammar needs
        too much time or memory.  Raises RequestError for a grammar of another kind or too long, and
        QueueFullError if too many are in use.
        """
        if kind not in _KINDS:
            text = f"grammar of kind {kind!r}: give json_schema, regex or lark"
            raise RequestError(text, "grammar")
        if len(text) > _LARGEST_TEXT:
            size = f"grammar of {len(text)} characters"
            raise RequestError(f"{size}: at most {_LARGEST_TEXT} are supported", "grammar")
        found = self._in_use.get((kind, text))
        if found is None or found.failure:
            if len(self._in_use) >= _MOST_GRAMMARS:
                self._kept.clear()
            if len(self._in_use) >= _MOST_GRAMMARS:
                raise QueueFullError(
                    f"{_MOST_GRAMMARS} grammars are in use, the most at the same time: try again "
                    "later"
                )
            found = self._in_use[kind, text] = _GrammarProcess(self._processes, kind, text)
        self._kept.append(found)
        return found.matcher(self._num_words)

    def close(self) -> None:
        """End the processes that no matcher uses."""
        self._kept.clear()
        self._processes.close()


class _GrammarProcess:
    """The connection to the process of one grammar.  It never waits for the process to read."""

    def __init__(self, processes: LimitedProcesses, kind: str, text: str) -> None:
        self.failure = ""
        self._kind = kind
        self._processes = processes
        self._connection = processes.open()
        self._connection.setblocking(False)
        self._matchers: weakref.WeakValueDictionary[int, GrammarMatcher] = (
            weakref.WeakValueDictionary()
        )
        self._numbers = count()
        self._unsent = bytearray()
        self._received = bytearray()
        self._send(json.dumps([kind, text]).encode())

    def matcher(self, num_words: int) -> GrammarMatcher:
        """Return a matcher at the start of the grammar."""
        number = next(self._numbers)
        found = GrammarMatcher(self, number, num_words)
        self._matchers[number] = found
        weakref.finalize(found, self.ask, number, DROP).atexit = False
        return found

    def ask(self, number: int, token: int) -> None:
        """Tell the process how a text goes on; it answers unless that is dropped."""
        self._send(STEP.pack(number, token))

    def exchange(self, seconds: float) -> None:
        """Send and receive as much as possible; wait at most ``seconds``."""
        if not self.failure:
            poll = select.poll()
            poll.register(self._connection, select.POLLIN | (select.POLLOUT * bool(self._unsent)))
            try:
                if poll.poll(1000 * seconds):
                    self._flush()
                    self._receive()
            except OSError:
                self.failure = exceeded()
        if self.failure:
            self._fail()

    def give_up(self) -> None:
        """End the texts of a process that does not answer; later requests get another process."""
        self.failure = f"its process has not answered for {_PATIENCE_S:g} s"
        self._connection.close()
        self._processes.close()
        self._fail()

    def _fail(self) -> None:
        for matcher in list(self._matchers.values()):
            matcher.take(_NOTHING, f"{self._kind} grammar: {self.failure}")

    def _send(self, data: bytes) -> None:
        self._unsent += LENGTH.pack(len(data)) + data
        with suppress(OSError):  # `exchange` reports it
            self._flush()

    def _flush(self) -> None:
        with suppress(BlockingIOError):
            while self._unsent:
                del self._unsent[: self._connection.send(self._unsent)]

    def _receive(self) -> None:
        with suppress(BlockingIOError):
            data = self._connection.recv(_READ_BYTES)
            if not data:
                self.failure = exceeded()
            self._received += data
        at = 0
        while len(self._received) >= (start := at + LENGTH.size):
            end = start + LENGTH.unpack_from(self._received, at)[0]
            if end > len(self._received):
                break
            self._take(bytes(self._received[start:end]))
            at = end
        del self._received[:at]

    def _take(self, answer: bytes) -> None:
        number, has_words = ANSWER.unpack_from(answer)
        matcher = self._matchers.get(number)
        if matcher is None:  # dropped meanwhile
            return
        if has_words:
            matcher.take(np.frombuffer(answer, np.int32, offset=ANSWER.size), "")
        else:
            matcher.take(_NOTHING, answer[ANSWER.size :].decode())

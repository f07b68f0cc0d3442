"""Text of generated tokens: one token at a time, stop strings, offsets.

The functions only need ``decode``: ids -> text.  Each token costs two decodings of a few ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from megatron.core.inference.paged_engine.request import FinishReason, RequestOutput, TokenOutput

Decode: TypeAlias = Callable[[list[int]], str]

_BROKEN = "\ufffd"  # how decoders show bytes that are no character (yet)
_CONTEXT = 6  # earlier ids that a decoder needs: for spaces before words, and parts of characters
_MAX_PENDING = 8  # ids that may wait for the rest of a character, which has 4 bytes at most


class Detokenizer:
    """Turn tokens into text one at a time; a character split over tokens comes out complete.

    ``before``: ids in front of the text, such as the prompt's.
    """

    def __init__(self, decode: Decode, before: Sequence[int] = ()) -> None:
        self._decode = decode
        self._ids = list(before[-_CONTEXT:])
        self._num_done = len(self._ids)  # ids whose text has been returned
        self._num_shown = len(decode(self._ids).rstrip(_BROKEN)) if self._ids else 0

    def add(self, token: int) -> str:
        """Return the characters that ``token`` completes."""
        self._ids.append(token)
        text = self._decode(self._ids)
        is_part = text.endswith(_BROKEN)
        if is_part and len(self._ids) - self._num_done < _MAX_PENDING:
            return ""
        return self._show(text)

    def end(self) -> str:
        """Return the text that still waits for the rest of a character."""
        if len(self._ids) == self._num_done:
            return ""
        return self._show(self._decode(self._ids))

    def add_all(self, tokens: Iterable[int]) -> str:
        """Return the text of the last tokens."""
        return "".join([self.add(token) for token in tokens]) + self.end()

    def _show(self, text: str) -> str:
        new = text[self._num_shown :]
        self._ids = self._ids[-_CONTEXT:]
        self._num_done = len(self._ids)
        self._num_shown = len(self._decode(self._ids))
        return new


class StopFinder:
    """Find the first of some strings in a text that comes in parts.

    Text that may be the beginning of a stop string is kept back.  ``rest``: the text behind the
    last stop string that was found.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self.rest = ""
        self._held = ""

    def add(self, text: str) -> tuple[str, str | None]:
        """Return the text before any stop string, and the stop string if one is complete."""
        text = self._held + text
        found = [(text.find(stop), stop) for stop in self._stops]
        found = [(at, stop) for at, stop in found if at >= 0]
        if found:
            at, stop = min(found)
            self._held = ""
            self.rest = text[at + len(stop) :]
            return text[:at], stop
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def end(self) -> str:
        """Return the text that was kept back."""
        held = self._held
        self._held = ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of ``text`` that begins ``stop``."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


@dataclass(frozen=True)
class TextRules:
    """Rules that end a text, besides its length.

    ``end_tokens``: end the text and have no text themselves.  ``min_tokens``: no stop string is
    looked for before.  ``keeps_stop``: the stop string stays in the text.
    """

    end_tokens: frozenset[int] = frozenset()
    stops: tuple[str, ...] = ()
    min_tokens: int = 0
    keeps_stop: bool = False


@dataclass(frozen=True)
class PlacedToken:
    """A token, and the number of characters of generated text before its first."""

    output: TokenOutput
    offset: int


@dataclass(frozen=True)
class TextDelta:
    """Text and tokens that are new.  ``stopped_by``: a stop string or token id."""

    text: str = ""
    tokens: tuple[PlacedToken, ...] = ()
    finish_reason: FinishReason | None = None
    stopped_by: str | int | None = None


@dataclass
class SampleText:
    """The text of one sample as its tokens arrive.

    A `finish_reason` of "stop" with a string in ``stopped_by`` comes from here, not from the
    engine: the caller then aborts the request.
    """

    decode: Decode
    rules: TextRules = field(default_factory=TextRules)
    before: Sequence[int] = ()
    num_tokens: int = 0

    def __post_init__(self) -> None:
        self._detokenizer = Detokenizer(self.decode, self.before)
        self._finder = StopFinder(self.rules.stops)
        self._length = 0  # characters of all tokens so far, shown or kept back
        self._shown = 0
        self._waiting: list[PlacedToken] = []

    def add(self, output: RequestOutput) -> TextDelta:
        """Return the text and tokens that ``output`` adds."""
        text = ""
        end_token: int | None = None
        for token in output.new:
            self.num_tokens += 1
            self._waiting.append(PlacedToken(token, self._length))
            is_last = token is output.new[-1] and output.finish_reason == "stop"
            if is_last and token.token in self.rules.end_tokens:
                end_token = token.token
                break
            piece = self._detokenizer.add(token.token)
            self._length += len(piece)
            shown, stop = self._look_for_stop(piece)
            text += shown
            if stop is not None:
                return self._delta(text, "stop", stop)
        if output.finish_reason is None:
            return self._delta(text, None, None)
        shown, stop = self._look_for_stop(self._detokenizer.end())
        text += shown
        if stop is None:
            text += self._finder.end()
        elif end_token is None:
            return self._delta(text, "stop", stop)
        return self._delta(text, output.finish_reason, end_token)

    def _look_for_stop(self, piece: str) -> tuple[str, str | None]:
        if self.num_tokens <= self.rules.min_tokens:
            return piece, None
        shown, stop = self._finder.add(piece)
        return (shown + stop if stop and self.rules.keeps_stop else shown), stop

    def _delta(
        self, text: str, reason: FinishReason | None, stopped_by: str | int | None
    ) -> TextDelta:
        """Return new text with its tokens; the last ones too, unless a stop string has cut them."""
        self._shown += len(text)
        is_whole = reason is not None and not isinstance(stopped_by, str)
        ready = [t for t in self._waiting if is_whole or t.offset < self._shown]
        self._waiting = self._waiting[len(ready) :]
        return TextDelta(text, tuple(ready), reason, stopped_by)

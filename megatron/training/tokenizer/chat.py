"""Conversations as token ids [n], and the mask [n] of those that training learns to write.

The complete text is tokenized at once; the mask follows from the characters of each token.  A token
is trained if it ends inside of a trained part of the text.  Trained parts are the
``{% generation %}`` blocks of a template that has them.  Otherwise they follow from renderings of
the first messages: an assistant's turn begins after the rendering of the messages before it with
the generation prompt, and ends with the rendering that it completes.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from megatron.core.chat_templates import (
    compile_template,
    open_last_message,
    read_chat_template,
    template_errors,
)
from megatron.core.config.errors import ConfigError, DataError
from megatron.core.datasets.conversations import Message as Message
from megatron.training.tokenizer.base import MegatronTokenizer, MissingToken

_WANTED_BY = "a chat template"
_MARKS = ("\ufdd0", "\ufdd1")  # code points that Unicode reserves for use inside of a program
_PROBE = "\u2603"  # content of a turn that no template compares with anything
_SHOWN = 600  # characters of a sample in an error message
_TAIL = 16  # characters at the end of a content that identify it


class EncodedChat(NamedTuple):
    """Token ids of a conversation, and which of them carry loss as labels."""

    tokens: np.ndarray  # int32 [n]
    is_trained: np.ndarray  # bool [n]


class Span(NamedTuple):
    """Characters ``start`` to ``end`` of a text."""

    start: int
    end: int


class ChatTemplate:
    """A chat template and the tokenizer of its text.

    ``origin`` is the flag or file of the template, for error messages.
    """

    def __init__(
        self,
        tokenizer: MegatronTokenizer,
        source: str,
        special_tokens: Mapping[str, str],
        origin: str,
    ) -> None:
        self.source = source
        self.origin = origin
        self._tokenizer = tokenizer
        self._has_blocks = re.search(r"{%[-+]?\s*generation\b", source) is not None
        self._errors = template_errors(_WANTED_BY)
        ids = {f"{role}_token": tokenizer.id_of(role) for role in ("bos", "eos")}
        names = tokenizer.inv_vocab
        own = {name: names[i] for name, i in ids.items() if i is not None and i in names}
        self._special_tokens = own | dict(special_tokens)
        try:
            self._template = compile_template(source, _WANTED_BY, _MARKS)
        except self._errors as error:
            raise ConfigError(f"{origin}: {error}; give a template that jinja2 compiles") from error
        for name in ("bos_token", "eos_token"):
            token = self._special_tokens.get(name)
            if not token or name not in source:
                continue
            if (count := len(tokenizer.tokenize_plain(token))) != 1:
                raise ConfigError(
                    f"{origin} writes the {name} {token!r}, which the tokenizer splits into "
                    f"{count} ids; give the tokenizer's files of Hugging Face with "
                    "--tokenizer-type HuggingFaceTokenizer"
                )

    def encode(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        *,
        first_trained: int = 0,
    ) -> EncodedChat:
        """Return the tokens of a conversation; assistant turns from ``first_trained`` are trained.

        Raises DataError if the template refuses the messages, or the mask cannot be derived.
        """
        text, spans = self.trained_text(messages, tools, first_trained=first_trained)
        return encode_text(self._tokenizer, text, spans)

    def encode_prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> np.ndarray:
        """Return the tokens int32 [n] of a conversation and the header of the next answer.

        ``continue_final_message``: the last message goes on, without a header.  ``variables``: of
        the template.  Raises DataError if the template refuses the messages.
        """
        has_header = add_generation_prompt and not continue_final_message
        text, _ = self._render(messages, tools, add_generation_prompt=has_header, **variables)
        if continue_final_message:
            opened = open_last_message(text, str(messages[-1].get("content") or ""))
            if opened is None:
                raise DataError(
                    f"{self.origin}: the template does not write the text of the last message, "
                    "which is to go on; give it a text"
                )
            text = opened
        return np.array(self._tokenizer.tokenize_plain(text), np.int32)

    def stop_ids(self, tools: Sequence[Any] | None = None, **variables: Any) -> tuple[int, ...]:
        """Return the id of the token that ends an answer; empty if it ends with plain text."""
        turns = [{"role": "user", "content": _PROBE}, {"role": "assistant", "content": _PROBE}]
        text, _ = self._render(turns, tools, **variables)
        end = text.rpartition(_PROBE)[2].lstrip()
        named = (*self._tokenizer.appended_tokens(), self._special_tokens.get("eos_token", ""))
        found = [token for token in named if token and end.startswith(token)]
        return tuple(self._tokenizer.tokenize_plain(max(found, key=len, default=""))[:1])

    def trained_text(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        *,
        first_trained: int = 0,
    ) -> tuple[str, list[Span]]:
        """Return the text of a conversation, and the parts of it that are trained."""
        text, blocks = self._render(messages, tools)
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        spans = blocks
        if not blocks:
            spans = [self._turn(messages, tools, i, text) for i in turns if i >= first_trained]
        elif first_trained and any(turn < first_trained for turn in turns):
            prompt, _ = self._render(messages[:first_trained], tools)
            if not text.startswith(prompt):
                raise self._underivable("the messages change the rendering of the prompt", text)
            spans = [block for block in blocks if block.start >= len(prompt)]
        trained = [text[start:end] for start, end in spans]
        for n, i in enumerate(i for i in turns if i >= first_trained):
            written = "".join(trained) if blocks else trained[n]
            calls = messages[i].get("tool_calls")
            # The last call, or the first or the last word, must be there.
            first = () if calls else _words(messages[i])[:1]
            if _tail(messages[i]) not in written and not any(w[:_TAIL] in written for w in first):
                lost = "call of a function" if calls else "text"
                raise DataError(
                    f"{self.origin}: the template leaves out the {lost} of message {i}; give a "
                    "template that writes it with --chat-template.  A sample:\n" + text[:_SHOWN]
                )
        return text, spans

    def _turn(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, i: int, text: str
    ) -> Span:
        """Return the characters of ``text`` that the assistant writes as message ``i``."""
        before = messages[:i]
        answer = messages[i]
        after = messages[i + 1 :]
        prompt, _ = self._render(before, tools, add_generation_prompt=True)
        start = len(prompt)
        if not text.startswith(prompt):
            # A prompt may begin the reasoning, which the rendering of a complete answer omits: the
            # answer then starts after the part of the prompt that precedes any content.
            probe, _ = self._render(
                [*before, {"role": "assistant", "content": _PROBE}, *after], tools
            )
            asked, _ = self._render(before, tools)
            header = os.path.commonprefix((prompt, probe))
            start = len(header)
            shortest = len(os.path.commonprefix((prompt, asked)))
            if not text.startswith(header) or start < shortest or prompt == asked:
                reason = f"the rendering of the messages before message {i} does not begin the"
                raise self._underivable(f"{reason} complete one", text)
        until, _ = self._render([*before, answer], tools)
        if text.startswith(until) and len(until) > start:
            return Span(start, len(until))
        # The template renders the last message in another way than the others: it drops the
        # reasoning of earlier answers, or ends the conversation.
        rest = text[start:]
        tail = _tail(answer)
        if not until.startswith(text[:start]):
            raise self._underivable(f"message {i} changes the rendering of those before it", text)
        length = _overlap(until[start:], rest)
        if not length or tail not in rest[:length]:
            common = len(os.path.commonprefix((until, text)))
            length = max(0, self._before_token(text, common) - start)
            if tail not in rest[:length] or rest[:length].rstrip().endswith(tail):
                raise self._underivable(f"the end of message {i} is not found", text)
        return Span(start, start + length)

    def _before_token(self, text: str, at: int) -> int:
        """Return ``at``, or the start of the added token of the tokenizer that ``at`` is inside."""
        for token in self._tokenizer.appended_tokens():
            start = text.rfind(token, 0, at + len(token) - 1)
            if start != -1 and start < at < start + len(token):
                return start
        return at

    def _render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None,
        *,
        add_generation_prompt: bool = False,
        **variables: Any,
    ) -> tuple[str, list[Span]]:
        """Return the rendering, and the parts of it from generation blocks."""
        shown = json.dumps(messages, ensure_ascii=False, default=str) if self._has_blocks else ""
        if any(mark in shown for mark in _MARKS):
            raise DataError("a message contains U+FDD0 or U+FDD1, which are no characters")
        try:
            marked = self._template.render(
                **self._special_tokens,
                **{"documents": None, **variables},
                messages=list(messages),
                tools=tools,
                add_generation_prompt=add_generation_prompt,
            )
        except self._errors as error:
            reason = f"{self.origin}: the template refuses a conversation: {error}"
            raise DataError(reason) from None
        if not self._has_blocks:
            return marked, []
        pieces = re.split("[" + "".join(_MARKS) + "]", marked)
        stops = np.cumsum([len(piece) for piece in pieces]).tolist()
        spans = [Span(*stops[i : i + 2]) for i in range(0, len(stops) - 1, 2)]
        return "".join(pieces), [span for span in spans if span.end > span.start]

    def _underivable(self, reason: str, text: str) -> DataError:
        return DataError(
            f"{self.origin}: the tokens to train cannot be derived from this template: {reason}; "
            "mark what the assistant writes with {% generation %} and {% endgeneration %} in a "
            f"copy of the template, and give it as --chat-template.  A sample:\n{text[:_SHOWN]}"
        )


def load_chat_template(
    tokenizer: MegatronTokenizer, file: str | None, tokenizer_path: str | None
) -> ChatTemplate:
    """Return the template in ``file`` (--chat-template), or else that of the tokenizer's files.

    Raises ConfigError if there is none.
    """
    source, special_tokens = read_chat_template(file, tokenizer_path)
    if source is None:
        raise ConfigError(
            f"--tokenizer-model {tokenizer_path} has no chat template, which conversations need; "
            "give --chat-template with a file of jinja text"
        )
    origin = f"--chat-template {file}" if file else f"the chat template of {tokenizer_path}"
    return ChatTemplate(tokenizer, source, special_tokens, origin)


def encode_text(
    tokenizer: MegatronTokenizer, text: str, spans: Sequence[Span], *, adds_special: bool = False
) -> EncodedChat:
    """Return the tokens of ``text``; those that end inside of one of ``spans`` are trained.

    ``adds_special`` also returns the tokens that the tokenizer puts around a text.
    """
    try:
        ids, ends = tokenizer.tokenize_with_ends(text, adds_special=adds_special)
    except MissingToken:
        tokenize = tokenizer.tokenize if adds_special else tokenizer.tokenize_plain
        return _encode_by_prefixes(tokenize, text, spans)
    last = np.array(ends, np.int64)
    is_trained = np.zeros(len(ids), bool)
    for start, end in spans:
        is_trained |= (last > start) & (last <= end)
    return EncodedChat(np.array(ids, np.int32), is_trained)


def _encode_by_prefixes(
    tokenize: Callable[[str], list[int]], text: str, spans: Sequence[Span]
) -> EncodedChat:
    """Encode with a tokenizer that keeps no offsets: the ids of each prefix begin the ids."""
    tokens = tokenize(text)
    is_trained = np.zeros(len(tokens), bool)
    for span in spans:
        bounds = []
        for at in span:
            prefix = tokenize(text[:at])
            if tokens[: len(prefix)] != prefix:
                raise DataError(
                    "the tokenizer keeps no offsets into the text, and it joins the end of a turn "
                    f"with the text after it: {text[max(0, at - 20) : at + 20]!r}; give a "
                    "tokenizer.json"
                )
            bounds.append(len(prefix))
        is_trained[slice(*bounds)] = True
    return EncodedChat(np.array(tokens, np.int32), is_trained)


def _overlap(left: str, right: str) -> int:
    """Return the length of the longest prefix of ``right`` that ends ``left``."""
    at = left.find(right[0]) if right else -1
    while at != -1:
        begin = left[at : at + _TAIL]  # compared first: most places differ at once
        if right.startswith(begin) and right.startswith(left[at:]):
            return len(left) - at
        at = left.find(right[0], at + 1)
    return 0


def _words(message: Message) -> list[str]:
    content = message.get("content")
    return content.split() if isinstance(content, str) else []


def _tail(message: Message) -> str:
    """Return the end of the text that renderings of an assistant's message contain."""
    if calls := message.get("tool_calls"):
        call = calls[-1]
        return str(call.get("function", call).get("name", ""))
    return _words(message)[-1][-_TAIL:] if _words(message) else ""

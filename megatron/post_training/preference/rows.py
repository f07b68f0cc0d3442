"""Pairs of answers in fine-tuning data.

A row has ``prompt``, ``chosen`` and ``rejected``: three texts, or three lists of messages (and
``tools``).  Without a prompt, chosen and rejected are complete: what both begin with is the prompt.
Rows of ShareGPT have the prompt in ``conversations``, and one message in chosen and in rejected.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from megatron.core.config.errors import DataError
from megatron.core.datasets.conversations import (
    Conversation,
    answered_prompt,
    check_turns,
    messages_of,
    sharegpt_messages,
    tools_of,
)
from megatron.core.datasets.row_files import keys_of


class Pair(NamedTuple):
    """Two conversations with the same prompt; only the answers carry loss."""

    chosen: Conversation
    rejected: Conversation


ANSWERS = Pair._fields


def pair_of(row: Mapping[str, Any]) -> Pair:
    """Return the pair of a row, checked.  Raises DataError."""
    missing = [name for name in ANSWERS if row.get(name) is None]
    if missing:
        raise DataError(f"a row needs {' and '.join(ANSWERS)}; this one has {keys_of(row)}")
    if row["chosen"] == row["rejected"]:
        raise DataError("chosen and rejected are equal; remove the row")
    prompt = row.get("prompt")
    if prompt is None and row.get("conversations") is not None:
        prompt = list(sharegpt_messages(row))
    texts = [isinstance(row[name], str) for name in ANSWERS]
    # A text beside conversations repeats their first message.
    if prompt is not None and (all(texts) or not isinstance(prompt, str)):
        row = {**row, **{name: _listed(row[name]) for name in ANSWERS}}
        return Pair(*(answered_prompt(row, prompt, name) for name in ANSWERS))
    if all(texts):
        prompt, *rests = _shared_text(*(row[name] for name in ANSWERS))
        row = dict(zip(ANSWERS, rests, strict=True))
        return Pair(*(answered_prompt(row, prompt, name) for name in ANSWERS))
    answers = [messages_of(row[name], name) for name in ANSWERS]
    for messages in answers:
        check_turns(messages)
    chosen, rejected = answers
    same = 0
    while same < min(len(chosen), len(rejected)) and chosen[same] == rejected[same]:
        same += 1
    if not same:
        raise DataError("chosen and rejected begin with different messages; give the same prompt")
    tools = tools_of(row)
    return Pair(*(Conversation(messages, tools, first_trained=same) for messages in answers))


def _shared_text(chosen: str, rejected: str) -> tuple[str, str, str]:
    """Return the text that both begin with, and the rest of each: a space belongs to the rest."""
    same = len(os.path.commonprefix((chosen, rejected)))
    if same and chosen[same - 1] == " ":
        same -= 1
    if not same:
        raise DataError("chosen and rejected begin with different texts; give prompt")
    return chosen[:same], chosen[same:], rejected[same:]


def _listed(answer: object) -> object:
    """Return the answer of a row of ShareGPT, one message, as a list."""
    return [answer] if isinstance(answer, Mapping) else answer

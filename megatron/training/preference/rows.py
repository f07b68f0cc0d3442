"""Pairs of answers in fine-tuning data.

A row has ``prompt``, ``chosen`` and ``rejected``: three texts, or three lists of messages (and
``tools``).  Without a prompt, chosen and rejected are complete conversations: the messages that
both begin with are the prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from megatron.core.config.errors import DataError
from megatron.training.datasets.conversation import (
    Conversation,
    check_turns,
    conversation_of,
    messages_of,
    tools_of,
)


class Pair(NamedTuple):
    """Two conversations with the same prompt; only the answers carry loss."""

    chosen: Conversation
    rejected: Conversation


ANSWERS = Pair._fields


def pair_of(row: Mapping[str, Any]) -> Pair:
    """Return the pair of a row, checked.  Raises DataError."""
    missing = [name for name in ANSWERS if row.get(name) is None]
    if missing:
        raise DataError(
            f"a row needs {' and '.join(ANSWERS)}; this one has {', '.join(row) or 'nothing'}"
        )
    if row["chosen"] == row["rejected"]:
        raise DataError("chosen and rejected are equal; remove the row")
    if row.get("prompt") is not None:
        return Pair(*(conversation_of(_completed(row, name)) for name in ANSWERS))
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


def _completed(row: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the row of fine-tuning data whose answer is field ``name``."""
    return {"prompt": row["prompt"], "completion": row[name], "tools": row.get("tools")}

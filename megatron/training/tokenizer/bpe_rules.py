"""Rules of a byte-level BPE, in the form that faster libraries load."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True)
class BpeRules:
    """``tokenizer.json`` without post-processor, and the ids to add around each text."""

    tokenizer_json: str
    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    added_tokens: tuple[str, ...] = ()  # matched in a text before it is split


def without_post_processor(tokenizer_json: str) -> str:
    """Return the rules without post-processor, truncation and padding."""
    rules = json.loads(tokenizer_json)
    for key in ("post_processor", "truncation", "padding"):
        rules[key] = None
    return json.dumps(rules, ensure_ascii=False)


@cache
def byte_of_character() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for.

    Printable Latin-1 characters stand for themselves.  The characters from U+0100 on stand for the
    other bytes, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + i): byte for i, byte in enumerate(others)}

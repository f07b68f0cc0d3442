"""The bytes that each token of a vocabulary stands for, as grammars over bytes need them."""

from __future__ import annotations

import re
from collections.abc import Callable

from megatron.training.tokenizer.base import MegatronTokenizer
from megatron.training.tokenizer.tiktoken import CustomTikTokenizer

_ROLES = ("eod", "bos", "eos", "pad", "cls", "sep", "mask")
_SPACE = "\u2581"  # SentencePiece's sign for a space
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # SentencePiece's token of one byte
_PROBE = 'Hello {"a": [1, "two"]}\n'


def token_bytes(tokenizer: MegatronTokenizer) -> list[bytes | None] | None:
    """Return the bytes of each id; None for special tokens, which no text has.

    Return None for a tokenizer whose texts are not the joined bytes of their tokens.
    """
    try:
        probe = tokenizer.tokenize(_PROBE)
    except ValueError:
        return None  # it reads numbers only
    special = {tokenizer.id_of(role) for role in _ROLES}
    special |= {tokenizer.vocab.get(token) for token in tokenizer.appended_tokens()}
    bytes_of = _reader(tokenizer)
    found = [None if i in special else bytes_of(i) for i in range(tokenizer.vocab_size)]
    ids = [i for i in probe if i not in special]
    text = b"".join(found[i] or b"" for i in ids).decode(errors="replace")
    return found if text.strip() == _PROBE.strip() else None


def _reader(tokenizer: MegatronTokenizer) -> Callable[[int], bytes | None]:
    if isinstance(tokenizer, CustomTikTokenizer):
        return tokenizer.bytes_of
    names = tokenizer.inv_vocab
    table = _byte_level_table()
    is_byte_level = any("\u0120" in name for name in names.values())  # its sign for a space

    def bytes_of(index: int) -> bytes | None:
        name = names.get(index)
        if name is None:
            return None
        if is_byte_level:
            return bytes(map(table.__getitem__, name)) if table.keys() >= set(name) else None
        byte = _BYTE.fullmatch(name)
        return bytes.fromhex(byte[1]) if byte else name.replace(_SPACE, " ").encode()

    return bytes_of


def _byte_level_table() -> dict[str, int]:
    """Return the character -> byte of byte-level BPE: printable bytes stand for themselves."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    moved = {chr(256 + number): byte for number, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | moved

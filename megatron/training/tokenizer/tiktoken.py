"""TikTokenizer: byte-pair ranks from a file, run by the ``tiktoken`` library.

The special tokens have the first ids, the ranks follow.  The file is a JSON list of ranks, or a
JSON object with this list under ``vocab`` (tekken.json), or lines of base64 bytes and rank.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from operator import index
from pathlib import Path

from megatron.core.config.errors import ConfigError
from megatron.core.optional import require
from megatron.training.tokenizer.base import (
    MegatronTokenizer,
    MissingToken,
    TokenBatch,
    TokenizerSpec,
    pack,
)

# Patterns that split a text before bytes are merged; each is published with its ranks.
PATTERN_TIKTOKEN_V1 = (
    r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERN_TIKTOKEN_V2 = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PATTERNS = {"v1": PATTERN_TIKTOKEN_V1, "v2": PATTERN_TIKTOKEN_V2}
_DEFAULT_VOCAB_SIZE = 131072
_SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
_NEEDED = ("<unk>", "<s>", "</s>")


class CustomTikTokenizer(MegatronTokenizer):
    """Tokenizer of a file of ranks; special tokens in a text are ordinary text."""

    def __init__(
        self,
        path: str,
        pattern: str,
        vocab_size: int | None,
        num_special_tokens: int,
        special_tokens: Sequence[str] | None,
    ) -> None:
        super().__init__(
            path,
            pattern=pattern,
            vocab_size=vocab_size,
            num_special_tokens=num_special_tokens,
            special_tokens=special_tokens,
        )
        self.name = "TikTokenizer"
        library = require("tiktoken", "--tokenizer-type TikTokenizer")
        self._vocab_size = _DEFAULT_VOCAB_SIZE if vocab_size is None else vocab_size
        self._specials = _special_tokens(special_tokens, num_special_tokens)
        self._shift = num_special_tokens
        if self._vocab_size <= num_special_tokens:
            raise ConfigError(
                f"--vocab-size {self._vocab_size} leaves no id for text beside "
                f"--tiktoken-num-special-tokens {num_special_tokens}; raise the first"
            )
        ranks = _read_ranks(path, self._vocab_size - num_special_tokens)
        self._vocab_size = num_special_tokens + len(ranks)
        self._encoding = library.Encoding(
            name=path, pat_str=pattern, mergeable_ranks=ranks, special_tokens={}
        )

    @classmethod
    def build(cls, spec: TokenizerSpec) -> CustomTikTokenizer:
        """Build from --tokenizer-model, --vocab-size and --tiktoken-... of the command line."""
        pattern, special = spec.need("tiktoken_pattern"), spec.tiktoken_special_tokens
        if pattern not in _PATTERNS:
            raise ConfigError(f"--tiktoken-pattern {pattern!r} is unknown; use v1 or v2")
        return cls(
            spec.need("tokenizer_model"),
            _PATTERNS[pattern],
            spec.vocab_size,
            spec.tiktoken_num_special_tokens,
            None if special is None else list(special),
        )

    def tokenize(self, text: str, bos: bool = False, eos: bool = False) -> list[int]:
        ids = [index + self._shift for index in self._encoding.encode_ordinary(text)]
        return [self.bos] * bos + ids + [self.eos] * eos

    def tokenize_batch(self, texts: Sequence[str]) -> TokenBatch:
        batch = pack([self._encoding.encode_ordinary(text) for text in texts])
        return TokenBatch(batch.ids + self._shift, batch.lengths)

    def detokenize(self, ids: Sequence[int]) -> str:
        return b"".join(map(self.bytes_of, ids)).decode(errors="replace")

    def offsets(self, ids: Sequence[int], text: str) -> list[int]:
        if any(index < self._shift for index in ids):
            raise MissingToken(f"{self.name} keeps no offsets of special tokens")
        ranks = [index - self._shift for index in ids]
        starts: list[int] = self._encoding.decode_with_offsets(ranks)[1]
        return starts

    @cached_property
    def vocab(self) -> Mapping[str, int]:
        return {token: index for index, token in self.inv_vocab.items()}

    @cached_property
    def inv_vocab(self) -> Mapping[int, str]:
        special = dict(enumerate(self._specials))
        ranks = range(self._vocab_size - self._shift)
        decode = self._encoding.decode_single_token_bytes
        return special | {self._shift + rank: _readable(decode(rank)) for rank in ranks}

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def unk(self) -> int:
        """Id of the unknown token; no text contains it."""
        return self._special("unk")

    def _special(self, role: str) -> int:
        token = {"bos": "<s>", "eos": "</s>", "eod": "</s>"}.get(role, f"<{role}>")
        if token not in self._specials:
            return super()._special(role)
        return self._specials.index(token)

    def bytes_of(self, index: int) -> bytes:
        """Return the bytes of a token."""
        if index < self._shift:
            return self._specials[index].encode()
        found: bytes = self._encoding.decode_single_token_bytes(index - self._shift)
        return found


def _special_tokens(special_tokens: Sequence[str] | None, count: int) -> tuple[str, ...]:
    """Return the named special tokens, filled up to ``count`` with ``<SPECIAL_N>``."""
    named = tuple(_SPECIAL_TOKENS if special_tokens is None else special_tokens)
    missing = [token for token in _NEEDED if token not in named]
    if len(set(named)) != len(named) or missing:
        raise ConfigError(
            f"--tiktoken-special-tokens {' '.join(named)}: each once, and {' '.join(_NEEDED)} "
            "among them"
        )
    if len(named) > count:
        raise ConfigError(
            f"--tiktoken-num-special-tokens {count} is fewer than the {len(named)} special tokens "
            f"{' '.join(named)}; raise it"
        )
    return named + tuple(f"<SPECIAL_{i}>" for i in range(len(named), count))


def _read_ranks(path: str, count: int) -> dict[bytes, int]:
    """Return token -> rank for the first ``count`` ranks of the file.  Raises ConfigError."""
    try:
        content = Path(path).read_bytes()
        if content.lstrip()[:1] in (b"[", b"{"):
            entries = json.loads(content)
            entries = entries["vocab"] if isinstance(entries, dict) else entries
            found = {index(e["rank"]): e["token_bytes"] for e in entries}
        else:
            lines = (line.split() for line in content.splitlines() if line)
            found = {int(rank): token for token, rank in lines}
        tokens = {rank: base64.b64decode(token) for rank, token in found.items()}
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"--tokenizer-model {path}: {error!r}; it must be a JSON list of rank and "
            "token_bytes, a tekken.json, or lines of base64 and rank"
        ) from error
    ranks = {token: rank for rank, token in sorted(tokens.items()) if rank < count}
    # tiktoken ends the process at a byte that has no token.
    has_bytes = all(bytes([byte]) in ranks for byte in range(256))
    if sorted(ranks.values()) != list(range(len(ranks))) or not has_bytes:
        raise ConfigError(
            f"--tokenizer-model {path} has {len(ranks)} different tokens for ranks 0 to "
            f"{count - 1}; ranks must follow each other and begin with the 256 bytes"
        )
    return ranks


def _readable(token: bytes) -> str:
    """Return the token as text, or its escaped bytes if they are not complete characters."""
    text = token.decode(errors="replace")
    return repr(token)[2:-1] if "\ufffd" in text else text

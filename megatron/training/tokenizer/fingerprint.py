"""Which tokenizer wrote a data set: ``<prefix>.tokenizer.json`` beside ``<prefix>.bin``.

The fingerprint is of what the tokenizer does (ids of the vocabulary, of some texts, of EOD), not
of where its files lie or which library runs it.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from typing import Any

from megatron.core.config.errors import DataError
from megatron.training.tokenizer.base import MegatronTokenizer, MissingToken
from megatron.training.tokenizer.null import _NullTokenizer

# Texts on which tokenizers with one vocabulary and other rules differ.
_TEXTS = (
    "Hello, world! It's 1,234.5 o'clock.\n\n\tdef f(x):\n        return x  # na\u00efve caf\u00e9",
    " \u4f60\u597d\uff0c\u4e16\u754c \U0001f600 e\u0301 \ufb01 \u00a0 ",
)


@dataclass(frozen=True)
class Fingerprint:
    """What the sidecar file holds."""

    tokenizer: str
    vocab_size: int
    eod: int | None
    sha256: str

    @classmethod
    def of(cls, tokenizer: MegatronTokenizer) -> Fingerprint:
        """Digest the vocabulary and the behaviour of ``tokenizer``."""
        vocab = tokenizer.vocab
        tokens = sorted(vocab, key=vocab.__getitem__)
        is_null = isinstance(tokenizer, _NullTokenizer)
        ids = [] if is_null else [list(map(int, tokenizer.tokenize(text))) for text in _TEXTS]
        digest = hashlib.sha256("\0".join(tokens).encode(errors="surrogatepass"))
        digest.update(repr([sorted(vocab.values()), ids, _eod_of(tokenizer)]).encode())
        eod = _eod_of(tokenizer)
        return cls(tokenizer.name, tokenizer.vocab_size, eod, digest.hexdigest())

    def write(self, prefix: str) -> None:
        """Write the sidecar of ``prefix``, whole or not at all."""
        temporary = sidecar_path(prefix) + ".tmp"
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(asdict(self), file, indent=1)
        os.replace(temporary, sidecar_path(prefix))

    def __str__(self) -> str:
        return f"{self.tokenizer} ({self.vocab_size} ids, EOD {self.eod}, {self.sha256[:12]})"


def sidecar_path(prefix: str) -> str:
    """The file beside ``prefix.bin`` that says which tokenizer made it."""
    return prefix + ".tokenizer.json"


def read_fingerprint(prefix: str) -> Fingerprint | None:
    """The sidecar of ``prefix``; None if there is none, DataError if it is damaged."""
    path = sidecar_path(prefix)
    try:
        with open(path, encoding="utf-8") as file:
            values: dict[str, Any] = json.load(file)
        return Fingerprint(**values)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{path}: {error}; remove it, or preprocess the data again") from error


def _eod_of(tokenizer: MegatronTokenizer) -> int | None:
    try:
        return int(tokenizer.eod)
    except MissingToken:
        return None

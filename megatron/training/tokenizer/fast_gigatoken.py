"""Byte-level BPE with ``gigatoken``, which caches the ids of every word that it has met."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

import numpy as np

from megatron.core.optional import require
from megatron.training.tokenizer.base import MegatronTokenizer, TokenBatch, surround
from megatron.training.tokenizer.bpe_rules import BpeRules

logger = logging.getLogger(__name__)

_SHORT_TEXT = 400  # mean characters per text below which one call for all texts is faster
_MEMORY_GROWTH = 1 << 30  # bytes of cached words after which the encoder is rebuilt


class GigatokenEncoder:
    """Encoder on the calling thread only: worker processes already use all cores."""

    name = "gigatoken"

    def __init__(self, rules: BpeRules, memory_growth: int = _MEMORY_GROWTH) -> None:
        self._rules = rules
        self.added_tokens = rules.added_tokens
        self._memory_growth = memory_growth
        self._start_afresh()

    @classmethod
    def load(cls, rules: BpeRules, _owner: MegatronTokenizer) -> GigatokenEncoder | None:
        """Return an encoder; None, with the reason logged, if gigatoken cannot run these rules."""
        try:
            return cls(rules)
        except (RuntimeError, ValueError, TypeError, KeyError) as error:
            logger.info("gigatoken cannot run these rules: %s", str(error).splitlines()[0])
            return None

    def encode_batch(self, texts: Sequence[str]) -> TokenBatch:
        if _resident_bytes() - self._resident_before > self._memory_growth:
            self._start_afresh()
        if sum(map(len, texts)) < _SHORT_TEXT * len(texts):
            batch = self._encode_short(texts)
        else:
            rows = [self._bpe.encode(text) for text in texts]
            lengths = np.fromiter(map(len, rows), np.int64, len(rows))
            ids = np.concatenate(rows) if rows else np.empty(0, np.int32)
            batch = TokenBatch(ids.astype(np.int32), lengths)
        return surround(batch, self._rules.prefix, self._rules.suffix)

    def _encode_short(self, texts: Sequence[str]) -> TokenBatch:
        layout = self._bpe.encode_batch(list(texts), parallel=False).layout
        offsets = np.asarray(layout.offsets.data)
        ids = np.asarray(layout.content.data)[offsets[0] : offsets[-1]]
        return TokenBatch(ids.astype(np.int32), np.diff(offsets))

    def _start_afresh(self) -> None:
        rust = require("gigatoken", "--tokenizer-backend gigatoken").gigatoken_rs
        self._bpe = rust.load_hf_json(self._rules.tokenizer_json)
        self._resident_before = _resident_bytes()


def _resident_bytes() -> int:
    """Return the resident memory of this process."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

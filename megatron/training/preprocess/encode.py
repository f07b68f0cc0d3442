"""Encode blocks of records to arrays of tokens, in worker processes.

Workers are forked after everything is loaded, so nothing is loaded twice; results have the order of
the blocks.  Text is split into sentences by nltk's Punkt if it and its data are installed, else by
rules.
"""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import re
import shutil
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from megatron.core.config.errors import DataError, MegatronError
from megatron.core.optional import require, why_missing
from megatron.core.progress import CLEAR, can_replace_lines
from megatron.core.rank_local import each_rank_owns
from megatron.training.preprocess.documents import BadRecord, Block, RecordFormat, Text, flatten
from megatron.training.tokenizer.base import TokenBatch
from megatron.training.tokenizer.fast import TextEncoder

logger = logging.getLogger(__name__)

_LONGEST_TEXT = 1_000_000  # characters passed to Punkt in one call
_END = re.compile(r"""[.!?\u2026]+["')\]\u201d\u2019]*\s+|[\u3002\uff01\uff1f]+\s*|\n\s*\n\s*""")
_OPENS_SENTENCE = re.compile(r"""["'(\[\u201c\u2018]*[^\W_a-z]|["'(\[\u201c\u2018]+\S""")
_LAST_WORD = re.compile(r"([^\s.]*(?:\.[^\s.]+)*)\.+\s*$")
# English words that end in a full stop inside a sentence.
_ABBREVIATIONS = frozenset(
    "mr mrs ms dr prof sr jr st rev gen col capt lt sgt gov sen rep hon messrs mme mlle "
    "vs etc al cf e.g i.e viz no vol pp fig eq ch sec ed eds inc ltd co corp dept univ assn "
    "jan feb mar apr jun jul aug sep sept oct nov dec a.m p.m u.s u.k u.n ph.d approx est".split()
)


# Text -> its sentences in order; every visible character is preserved.
SentenceSplitter = Callable[[str], list[str]]


def sentence_splitter(language: str, keep_newlines: bool) -> SentenceSplitter:
    """Return Punkt for ``language``; if it is missing, log a warning and return the rules."""
    reason = why_missing("nltk")
    if reason is None:
        nltk = require("nltk", "--split-sentences")
        try:
            return partial(split_by_punkt, nltk.tokenize.PunktTokenizer(language), keep_newlines)
        except (LookupError, AttributeError):
            reason = f"nltk has no punkt_tab data for {language}"
    logger.warning(
        "--split-sentences: %s, so sentences are split by simple rules made for English; "
        "install nltk and its punkt_tab data for what it learned of %s",
        reason,
        language,
    )
    return partial(split_by_rules, keep_newlines)


def split_by_punkt(punkt: Any, keep_newlines: bool, text: str) -> list[str]:
    """Return Punkt's sentences, with the blanks after each if ``keep_newlines``."""
    sentences = []
    for begin in range(0, len(text), _LONGEST_TEXT):
        piece = text[begin : begin + _LONGEST_TEXT]
        spans = list(punkt.span_tokenize(piece))
        if keep_newlines:
            starts = [start for start, _ in spans]
            spans = list(zip(starts, [*starts[1:], len(piece)], strict=False))
        sentences += [piece[start:end] for start, end in spans]
    return sentences


def split_by_rules(keep_newlines: bool, text: str) -> list[str]:
    """Split after an end mark if a capital follows, and at blank lines.

    No sentence ends after an abbreviation.
    """
    found = _END.finditer(text)
    ends = [end.end() for end in found if end.group().isspace() or _is_end(text, end)]
    sentences = [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]
    return [s if keep_newlines else s.strip() for s in sentences if s and not s.isspace()]


def _is_end(text: str, found: re.Match[str]) -> bool:
    if not _OPENS_SENTENCE.match(text, found.end()):
        return False
    before = _LAST_WORD.search(text, max(0, found.start() - 20), found.end())
    word = before.group(1).lower() if before else ""
    is_initial = len(word) == 1 and word.isalpha() and word != "i"
    return not (word in _ABBREVIATIONS or is_initial)


class EncodedTexts(NamedTuple):
    """Tokens of a block's documents for one key, without empty sequences."""

    tokens: np.ndarray  # [sum(lengths)], in the type of the .bin file
    lengths: np.ndarray  # int32 [sequences]
    num_sequences: np.ndarray  # int64 [documents]: 0 for an empty document


@dataclass(frozen=True)
class EncodedBlock:
    """Result that a worker sends to the main process."""

    texts: dict[str, EncodedTexts]  # per key
    num_documents: int
    num_bytes: int  # decompressed text
    stored_bytes: int  # on disk


@dataclass
class BlockEncoder:
    """Encoder of a worker; built before the workers are forked."""

    encoder: TextEncoder
    record_format: RecordFormat
    dtype: type[np.integer]
    vocab_size: int
    eod: int | None  # None: append nothing
    splitter: SentenceSplitter | None

    def encode(self, block: Block) -> EncodedBlock:
        """Encode all documents of the block.  Raises BadRecord for a line that cannot be used."""
        texts = self.record_format.texts(block)
        found = {key: self._encode_key(block, documents) for key, documents in texts.items()}
        num_documents = len(next(iter(texts.values())))
        return EncodedBlock(found, num_documents, block.end - block.start, block.stored_bytes)

    def _encode_key(self, block: Block, documents: Sequence[Text]) -> EncodedTexts:
        if self.splitter is not None:
            split = self.splitter
            documents = [split(text) if isinstance(text, str) else text for text in documents]
        texts, counts = flatten(documents)
        try:
            batch = self.encoder.encode_batch(texts)
        except (TypeError, UnicodeError) as error:
            for index, text in enumerate(documents):
                try:
                    "".join(text).encode()
                except UnicodeEncodeError as wrong:
                    newlines = self.record_format.newlines_before(block, index)
                    reason = f"the text is no Unicode: {wrong.reason}"
                    raise BadRecord(block, newlines, reason) from error
            raise
        self._check_ids(batch)
        encoded = self._assemble(batch, np.asarray(counts, np.int64))
        if self.record_format.empty_is_error and not encoded.num_sequences.all():
            first_empty = int(np.argmin(encoded.num_sequences))
            newlines = self.record_format.newlines_before(block, first_empty)
            raise BadRecord(block, newlines, "the line has no token")
        return encoded

    def _assemble(self, batch: TokenBatch, counts: np.ndarray) -> EncodedTexts:
        """Drop empty sequences and append EOD to the last sequence of each document with tokens."""
        filled = batch.lengths > 0
        document = np.repeat(np.arange(len(counts)), counts)
        num_sequences = np.bincount(document[filled], minlength=len(counts))
        lengths = batch.lengths[filled]
        tokens = batch.ids.astype(self.dtype)
        if self.eod is not None:
            last = np.cumsum(num_sequences)[num_sequences > 0] - 1
            tokens = np.insert(tokens, np.cumsum(lengths)[last], self.eod)
            lengths[last] += 1
        return EncodedTexts(tokens, lengths.astype(np.int32), num_sequences)

    def _check_ids(self, batch: TokenBatch) -> None:
        """Raise DataError unless all ids fit the file's dtype, chosen by the vocabulary size."""
        limits = np.iinfo(self.dtype)
        for wrong in (batch.ids.min(initial=0), batch.ids.max(initial=0)):
            if not limits.min <= wrong <= limits.max:
                raise DataError(
                    f"the tokenizer gave the id {wrong} and says that its vocabulary has "
                    f"{self.vocab_size}: its files do not belong together"
                )


_SHORTEST_S = 0.5  # minimum time between two lines


class Progress:
    """Counter of documents and bytes; prints at most once per ``log_interval`` documents."""

    def __init__(self, total_stored_bytes: int, log_interval: int) -> None:
        self._total_stored = total_stored_bytes
        self._log_interval = log_interval
        self._stored = self._bytes = self.num_documents = 0
        self._printed_documents = 0
        self._started_at_s = self._printed_at_s = time.monotonic()

    def add(self, num_documents: int, num_bytes: int, stored_bytes: int) -> None:
        """Count documents, their bytes of text, and the bytes on disk that they occupy."""
        self.num_documents += num_documents
        self._bytes += num_bytes
        self._stored += stored_bytes
        waited = self.num_documents - self._printed_documents >= self._log_interval
        if waited and time.monotonic() - self._printed_at_s >= _SHORTEST_S:
            self._printed_documents = self.num_documents
            self._printed_at_s = time.monotonic()
            self.print()

    def print(self, *, is_last: bool = False) -> None:
        """Print a line with documents, rates, percentage and remaining time.

        On a terminal the next line replaces it, unless ``is_last``.
        """
        elapsed_s = max(time.monotonic() - self._started_at_s, 1e-9)
        share = self._stored / self._total_stored if self._total_stored else 1.0
        left_s = round(elapsed_s * (1 - share) / share) if share else 0
        text = (
            f"Processed {self.num_documents} documents "
            f"({self.num_documents / elapsed_s:.1f} docs/s, "
            f"{self._bytes / 1e6 / elapsed_s:.2f} MB/s), {100 * share:.1f} %, "
            f"{timedelta(seconds=left_s)} left"
        )
        end = "\n"
        if can_replace_lines(sys.stderr) and not is_last:
            text = text[: shutil.get_terminal_size().columns - 1]  # a longer one would wrap
            end = f"{CLEAR}\r"
        print(text, end=end, file=sys.stderr, flush=True)


_WINDOW = 4  # blocks per worker in progress, or waiting for an earlier block
_SIGNAL_OF_DEAD_PARENT = 1  # PR_SET_PDEATHSIG of prctl


class WorkerPool:
    """Context manager of worker processes: they end when the ``with`` block ends."""

    def __init__(self, encoder: BlockEncoder, num_workers: int) -> None:
        fork = multiprocessing.get_context("fork")
        self._pool = ProcessPoolExecutor(num_workers, fork, _begin, (encoder,))
        self._num_blocks = _WINDOW * num_workers

    def __enter__(self) -> WorkerPool:
        self._pool.submit(int)  # the first call forks all workers
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def map(self, blocks: Iterable[Block]) -> Iterator[EncodedBlock]:
        """Yield encoded ``blocks`` in order.  Raises the first error of a worker."""
        waiting: deque[Future[EncodedBlock]] = deque()
        try:
            for block in blocks:
                waiting.append(self._pool.submit(_encode, block))
                if len(waiting) == self._num_blocks:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool as error:
            raise DataError(
                "a worker process was ended by a signal; if memory ran out, use fewer --workers"
            ) from error


_encoder: BlockEncoder | None = None  # of a worker
each_rank_owns(__name__, "_encoder")


def _begin(encoder: BlockEncoder) -> None:
    """Begin a worker: it inherits ``encoder``, and ends with the main process."""
    global _encoder
    _encoder = encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process ends its workers
    ctypes.CDLL(None).prctl(_SIGNAL_OF_DEAD_PARENT, signal.SIGKILL)


def _encode(block: Block) -> EncodedBlock:
    assert _encoder is not None
    try:
        return _encoder.encode(block)
    except BadRecord:
        raise
    except MegatronError as error:
        place = f"{block.path}, bytes {block.start} to {block.end}"
        raise DataError(f"{place}: {error}") from error

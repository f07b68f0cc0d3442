"""Encode blocks of records to arrays of tokens: the work of one worker process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron.core.config.errors import DataError
from megatron.training.preprocess.documents import BadRecord, RecordFormat, Text, flatten
from megatron.training.preprocess.inputs import Block
from megatron.training.preprocess.sentences import SentenceSplitter
from megatron.training.tokenizer.base import TokenBatch
from megatron.training.tokenizer.fast import TextEncoder


@dataclass(frozen=True)
class EncodedTexts:
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
            raise self._not_unicode(block, documents, error) from error
        self._check_ids(batch)
        encoded = self._assemble(batch, np.asarray(counts, np.int64))
        if self.record_format.empty_is_error and not encoded.num_sequences.all():
            wrong = int(np.argmin(encoded.num_sequences))
            newlines = self.record_format.newlines_before(block, wrong)
            raise BadRecord(block.path, newlines, block.start, "the line has no token")
        return encoded

    def _assemble(self, batch: TokenBatch, counts: np.ndarray) -> EncodedTexts:
        """Drop empty sequences and append EOD to the last sequence of each document with tokens."""
        filled = batch.lengths > 0
        document = np.repeat(np.arange(len(counts)), counts)
        num_sequences = np.bincount(document[filled], minlength=len(counts))
        lengths = batch.lengths[filled]
        if self.eod is None:
            tokens = batch.ids.astype(self.dtype)
            return EncodedTexts(tokens, lengths.astype(np.int32), num_sequences)
        last = np.cumsum(num_sequences)[num_sequences > 0] - 1
        lengths[last] += 1
        tokens = np.empty(int(lengths.sum()), self.dtype)
        is_text = np.ones(len(tokens), bool)
        is_text[np.cumsum(lengths)[last] - 1] = False
        tokens[is_text] = batch.ids
        tokens[~is_text] = self.eod
        return EncodedTexts(tokens, lengths.astype(np.int32), num_sequences)

    def _check_ids(self, batch: TokenBatch) -> None:
        """Raise DataError unless all ids fit the file's dtype, chosen by the vocabulary size."""
        if len(batch.ids) == 0:
            return
        limits = np.iinfo(self.dtype)
        low, high = int(batch.ids.min()), int(batch.ids.max())
        if low < limits.min or high > limits.max:
            raise DataError(
                f"the tokenizer gave the id {high if high > limits.max else low} and says that "
                f"its vocabulary has {self.vocab_size}: its files do not belong together"
            )

    def _not_unicode(self, block: Block, documents: Sequence[Text], error: Exception) -> Exception:
        """Return a BadRecord for the document with a lone surrogate, else ``error`` itself."""
        for index, text in enumerate(documents):
            try:
                "".join(text).encode()
            except UnicodeEncodeError as wrong:
                newlines = self.record_format.newlines_before(block, index)
                reason = f"the text is no Unicode: {wrong.reason}"
                return BadRecord(block.path, newlines, block.start, reason)
        return error

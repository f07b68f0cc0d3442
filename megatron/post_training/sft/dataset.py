"""Training samples of conversations: a row holds one, or as many as fit (--sft).

A conversation of n tokens takes n - 1 positions of a row: its tokens but the last are inputs, its
tokens but the first are labels.  Samples of a row do not attend to each other, and each starts at
position 0.  Tokens and masks of all conversations are encoded once, into the index cache.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch

from megatron.core.config.errors import ConfigError, DataError
from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron.core.datasets.conversations import (
    Conversation,
    conversation_of,
    form_of,
    open_rows,
    read_all,
    read_row,
)
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.core.datasets.index_cache import cached_arrays
from megatron.core.datasets.megatron_dataset import MegatronDataset, Sample, description_hash
from megatron.core.datasets.packing import PackedEpochs
from megatron.core.datasets.utils import Split
from megatron.core.packed_seq_params import PackedBounds
from megatron.training.tokenizer.base import MegatronTokenizer
from megatron.training.tokenizer.chat import ChatTemplate, EncodedChat, Span, encode_text
from megatron.training.tokenizer.fingerprint import Fingerprint

logger = logging.getLogger(__name__)

_ARRAYS: dict[str, tuple[int, ...]] = {"tokens": (), "is_trained": (), "ends": ()}


@dataclass(kw_only=True)
class SFTDatasetConfig(GPTDatasetConfig):
    """Settings of `SFTDataset`.

    ``chat``: None for data without messages.  ``alignment``: each packed sample is padded to a
    multiple of it.  ``truncates``: a conversation that is too long is cut, otherwise left out.
    ``row_multiple``: rows end with their last sample, padded to a multiple of it; None: all rows
    have ``sequence_length`` tokens.
    """

    chat: ChatTemplate | None = None
    packs: bool = True
    alignment: int = 1
    truncates: bool = True
    row_multiple: int | None = None

    @property
    def chat_hash(self) -> str:
        """Digest of the chat template."""
        source = "" if self.chat is None else self.chat.source
        return hashlib.sha256(source.encode()).hexdigest()

    @cached_property
    def tokenizer_hash(self) -> str:
        """Digest of the ids that the tokenizer gives."""
        return Fingerprint.of(self.tokenizer).sha256


@dataclass(frozen=True)
class EncodedRows:
    """Tokens of all conversations of a file, concatenated.

    tokens int32 [t], is_trained bool [t], and where each conversation ends, int64 [n].
    """

    tokens: np.ndarray
    is_trained: np.ndarray
    ends: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each conversation."""
        return np.diff(self.ends, prepend=0)

    def __getitem__(self, i: int) -> EncodedChat:
        start = int(self.ends[i - 1]) if i else 0
        stop = int(self.ends[i])
        return EncodedChat(self.tokens[start:stop], self.is_trained[start:stop])


class SFTLowLevelDataset:
    """Conversations of a jsonl or parquet file, or a folder: ``dataset[i]`` is a list of messages.

    Raises ConfigError without a path, DataError for a missing file and a wrong row.  Subclasses
    read several conversations, ``per_row``, from each row; ``encodes`` names the encoded arrays.
    """

    per_row = 1
    unit = "conversations"
    encodes = "EncodedRows"

    def __init__(self, dataset_path: str | None) -> None:
        if dataset_path is None:
            raise ConfigError(
                "no data is named: give --data-path (or data of each split), or --mock-data"
            )
        self.dataset_path = dataset_path
        self.rows = open_rows(dataset_path)
        if not len(self.rows):
            raise DataError(f"{dataset_path} has no rows; write one of the {self.unit} per line")
        self._encoded: dict[str, EncodedRows] = {}

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, idx: int) -> list[Any]:
        return list(read_row(self.rows, idx, self.conversations_of)[0].messages)

    def encoded(self, config: SFTDatasetConfig) -> EncodedRows:
        """Return the tokens of all conversations, from the index cache.  Not a collective.

        Raises DataError that lists the rows which cannot be used.
        """
        identity = {
            "class": self.encodes,
            "dataset_path": self.dataset_path,
            "tokenizer": config.tokenizer_hash,
            "chat_template": config.chat_hash,
        }
        named = description_hash(json.dumps(identity, indent=4))
        if named not in self._encoded:
            beside = os.path.join(
                os.path.splitext(self.dataset_path)[0], "cache", "SFTDataset_indices"
            )
            folder = beside if config.path_to_cache is None else config.path_to_cache
            description = json.dumps({**identity, "files": self.rows.versions()}, indent=4)
            prefix = os.path.join(folder, f"{named}-SFTDataset")
            arrays = cached_arrays(prefix, description, _ARRAYS, lambda: self._encode(config))
            self._encoded[named] = EncodedRows(*arrays)
            first = self.conversations_of(self.rows[0])[0]
            form = form_of(self.rows[0])
            shown = json.dumps(first.messages, ensure_ascii=False)
            logger.info("%s has rows of %s, read as %.300s", self.dataset_path, form, shown)
        return self._encoded[named]

    def _encode(self, config: SFTDatasetConfig) -> Sequence[np.ndarray]:
        """Return the arrays of `EncodedRows`."""
        began_s = time.perf_counter()
        of_rows = read_all(
            self.rows,
            lambda row: [self.encode(each, config) for each in self.conversations_of(row)],
            self.unit,
        )
        found = list(chain.from_iterable(of_rows))
        ends = np.cumsum([len(chat.tokens) for chat in found], dtype=np.int64)
        tokens = np.concatenate([chat.tokens for chat in found] or [np.empty(0, np.int32)])
        is_trained = np.concatenate([chat.is_trained for chat in found] or [np.empty(0, bool)])
        logger.info(
            "encoded %d %s of %s in %.1f s: %d tokens, of which %d are trained",
            len(self),
            self.unit,
            self.dataset_path,
            time.perf_counter() - began_s,
            len(tokens),
            int(is_trained.sum()),
        )
        return tokens, is_trained, ends

    def conversations_of(self, row: Mapping[str, Any]) -> Sequence[Conversation]:
        """Return the conversations of ``row``.  Raises DataError."""
        return [conversation_of(row)]

    def encode(self, conversation: Conversation, config: SFTDatasetConfig) -> EncodedChat:
        """Return the tokens of a conversation.  Raises DataError if no answer has text."""
        if config.chat is None and not conversation.is_text:
            raise DataError(
                "messages need a chat template; give --chat-template with a file of jinja "
                "text, or a tokenizer whose files have one"
            )
        encoded = encode_conversation(conversation, config.tokenizer, config.chat)
        if not encoded.is_trained[1:].any():
            raise DataError("no token of it is trained; an answer must have text")
        return encoded


def encode_conversation(
    conversation: Conversation, tokenizer: MegatronTokenizer, chat: ChatTemplate | None
) -> EncodedChat:
    """Return the tokens and the mask of a conversation.  ``chat`` may be None for plain texts."""
    messages = conversation.messages
    if not conversation.is_text:
        assert chat is not None, "messages need a chat template"
        return chat.encode(messages, conversation.tools, first_trained=conversation.first_trained)
    prompt, completion = (message["content"] for message in messages)
    text = prompt + completion
    encoded = encode_text(tokenizer, text, [Span(len(prompt), len(text))], adds_special=True)
    if encoded.tokens[-1:].tolist() == [tokenizer.eod]:  # the tokenizer's files add it
        return EncodedChat(encoded.tokens, np.append(encoded.is_trained[:-1], True))
    tokens = np.append(encoded.tokens, np.int32(tokenizer.eod))
    return EncodedChat(tokens, np.append(encoded.is_trained, True))


class Place(NamedTuple):
    """Positions ``start`` to ``start + length`` of a row, which hold a conversation."""

    row: int  # number of a row of the data
    turn: int  # number of the conversation in that row
    start: int
    length: int


class SFTDataset(MegatronDataset):
    """Rows of conversations of one split, as dictionaries of tensors of s tokens.

    Keys: tokens, labels, position_ids i64 [s]; loss_mask f32 [s], 1 where the assistant writes the
    label; is_padding bool [s]; packed_seq_params: the bounds of samples, padding being the last.
    ``dataset[None]`` is a row without loss, which pads an incomplete batch.
    """

    config: SFTDatasetConfig
    split_unit = "conversations"

    def __init__(
        self,
        dataset: Any,
        dataset_path: str | None,
        indices: np.ndarray,
        num_samples: int | None,
        index_split: Split,
        config: GPTDatasetConfig,
    ) -> None:
        if not isinstance(config, SFTDatasetConfig):
            # Of a script for Megatron-LM, which does not pack; its SFTTokenizer has a template.
            given = {f.name: vars(config)[f.name] for f in fields(config) if f.init}
            config = SFTDatasetConfig(**given, chat=config.tokenizer.chat, packs=False)
        super().__init__(dataset, dataset_path, indices, num_samples, index_split, config)
        self.encoded: EncodedRows = dataset.encoded(config)
        self._per_row: int = dataset.per_row
        tokenizer = config.tokenizer
        pads = [tokenizer.id_of("pad"), tokenizer.id_of("eod"), 0]
        self._pad = next(index for index in pads if index is not None)
        self.kept_lengths = self._find_kept_lengths()
        lengths = self._aligned(self.kept_lengths).sum(1)
        seed = config.random_seed * len(Split) + index_split.value
        self.rows = PackedEpochs(lengths, config.sequence_length, seed, packs=config.packs)
        if not self.rows.rows_per_epoch:
            raise DataError(
                f"{dataset_path}: all {self.split_unit} of the {index_split.name} split are longer "
                f"than --seq-length {config.sequence_length} and left out: raise it"
            )
        logger.info(
            "%d %s of %s are %d rows of %d tokens, %.1f %% full",
            int(np.count_nonzero(lengths)),
            self.split_unit,
            dataset_path or "synthetic data",
            self.rows.rows_per_epoch,
            config.sequence_length,
            100 * self.rows.fill,
        )

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: Any) -> int:
        """Return the number of conversations."""
        return len(low_level_dataset)

    @staticmethod
    def build_low_level_dataset(
        dataset_path: str | None, config: BlendedMegatronDatasetConfig
    ) -> Any:
        """Open the conversations at ``dataset_path``."""
        return SFTLowLevelDataset(dataset_path)

    @staticmethod
    def _key_config_attributes() -> list[str]:
        own = ["chat_hash", "packs", "alignment", "truncates"]
        return [*MegatronDataset._key_config_attributes(), *own]

    def __len__(self) -> int:
        n = self.rows.rows_per_epoch
        return n if self.num_samples is None else -(-self.num_samples // n) * n

    def __getitem__(self, idx: int | None) -> Sample:
        s = self.config.sequence_length
        if self.trimmed_lengths is not None:
            s = int(self.trimmed_lengths[self.rows[idx or 0]].sum())
        row: dict[str, Any] = {
            "tokens": np.full(s, self._pad, np.int64),
            "labels": np.full(s, self._pad, np.int64),
            "loss_mask": np.zeros(s, np.float32),
            "is_padding": np.ones(s, bool),
        }
        ends = [0]
        for place in self.places(idx):
            chat = self.chat(place)
            here = slice(place.start, place.start + place.length)
            row["tokens"][here] = chat.tokens[: place.length]
            row["labels"][here] = chat.tokens[1 : place.length + 1]
            row["is_padding"][here] = False
            if idx is not None:
                row["loss_mask"][here] = chat.is_trained[1 : place.length + 1]
            ends.append(place.start + int(self._aligned(place.length)))
        if ends[-1] < s:
            ends.append(s)
        lengths = np.diff(ends)
        row["position_ids"] = np.arange(s) - np.repeat(ends[:-1], lengths)
        bounds = PackedBounds(torch.tensor(ends, dtype=torch.int32), int(lengths.max()))
        tensors = {name: torch.from_numpy(values) for name, values in row.items()}
        return {**tensors, "packed_seq_params": bounds}

    def places(self, idx: int | None) -> Iterator[Place]:
        """Yield where row ``idx`` holds conversations."""
        start = 0
        for number in self.rows[0 if idx is None else int(idx)]:
            for turn, length in enumerate(self.kept_lengths[number].tolist()):
                yield Place(int(self.indices[number]), turn, start, length)
                start += int(self._aligned(length))

    @cached_property
    def trimmed_lengths(self) -> np.ndarray | None:
        """Number of tokens of the row of each conversation, padding included; None: all are full.

        0 for a conversation that is left out.
        """
        unit = self.config.row_multiple
        if unit is None:
            return None
        assert not self.config.packs, "a row of several conversations is full"
        rounded = -(-self.rows.lengths // unit) * unit
        return np.asarray(np.minimum(rounded, self.config.sequence_length))

    def chat(self, place: Place) -> EncodedChat:
        """Return the complete conversation at ``place``."""
        found: EncodedChat = self.encoded[place.row * self._per_row + place.turn]
        return found

    def _aligned(self, n: Any) -> Any:
        """Return ``n`` rounded up to the alignment."""
        return -(-n // self.config.alignment) * self.config.alignment

    def _find_kept_lengths(self) -> np.ndarray:
        """Return the positions that each conversation takes: [rows of the split, per_row].

        0 for all of a row that is left out.  Logs how many rows are cut or left out.
        """
        s = self.config.sequence_length
        lengths = self.encoded.lengths.reshape(-1, self._per_row)[self.indices] - 1
        long = np.flatnonzero(self._aligned(lengths).sum(1) > s)
        if len(long):
            lengths[long] = self._cut(lengths[long], s) if self.config.truncates else 0
            for number in long.tolist():
                if not self._all_have_loss(number, lengths[number]):
                    lengths[number] = 0
            num_left_out = int(np.count_nonzero(lengths[long].sum(1) == 0))
            logger.warning(
                "%s: %d of %d %s are longer than --seq-length %d: %d are cut to it, %d are left "
                "out (--sft-long-conversations)",
                self.dataset_path,
                len(long),
                len(lengths),
                self.split_unit,
                s,
                len(long) - num_left_out,
                num_left_out,
            )
        return np.asarray(lengths)

    def _cut(self, lengths: np.ndarray, total: int) -> np.ndarray:
        """Return ``lengths`` [n, per_row], of which those above a fair part of ``total`` are cut.

        A conversation may take the positions that the other of its row does not need.
        """
        fair = total // self._per_row // self.config.alignment * self.config.alignment
        others = self._aligned(np.minimum(lengths, fair))
        room = total - (others.sum(1, keepdims=True) - others)
        return np.asarray(np.minimum(lengths, np.maximum(fair, room)))

    def _all_have_loss(self, number: int, lengths: np.ndarray) -> bool:
        """Return whether each conversation of a row has a trained label in its first positions."""
        row = int(self.indices[number])
        return all(
            self.chat(Place(row, turn, 0, n)).is_trained[1 : n + 1].any()
            for turn, n in enumerate(lengths.tolist())
        )


class MockSFTDataset(SFTDataset):
    """Synthetic conversations of log-normal lengths, the second half of each trained."""

    @staticmethod
    def build_low_level_dataset(
        dataset_path: str | None, config: BlendedMegatronDatasetConfig
    ) -> Any:
        """Return a source of conversations that needs no file."""
        return MockConversations()


class MockConversations:
    """1,000 rows of conversations of 120 tokens in the median.

    They depend on the vocabulary size only.
    """

    def __init__(self, per_row: int = 1) -> None:
        self.per_row = per_row

    def __len__(self) -> int:
        return 1000

    def encoded(self, config: SFTDatasetConfig) -> EncodedRows:
        """Return the tokens of all conversations."""
        random = np.random.Generator(np.random.Philox(key=len(self)))
        count = len(self) * self.per_row
        lengths = random.lognormal(np.log(120), 0.8, count).astype(np.int64) + 2
        ends = np.cumsum(lengths)
        place = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)
        firsts = np.repeat(random.integers(config.tokenizer.vocab_size, size=count), lengths)
        tokens = ((firsts + place) % config.tokenizer.vocab_size).astype(np.int32)
        return EncodedRows(tokens, place >= np.repeat(lengths // 2, lengths), ends)

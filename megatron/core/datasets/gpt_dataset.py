"""Training samples for left-to-right models: documents concatenated and split at a fixed length.

A sample is ``sequence_length`` input tokens and, with ``add_extra_token_to_sequence``, one more
token as the label of the last.  A sample may cross document boundaries.  Its tokens depend only on
the data, the seed and the sample number.  ``s`` is the sequence length, ``...`` any leading
dimensions (a batch, or none).

Three index arrays, built once and cached, map samples to tokens:
document_index i32[E]: sequence numbers in reading order, shuffled, for all epochs.
sample_index [n+1, 2]: start of each sample (position in document_index, token offset).
shuffle_index u32[n]: order in which the dataset returns samples.
Arrays, file names and the use of random numbers are a file format: equal requests must give equal
bytes.  With ``index_free`` there are no arrays, and `DocumentOrder` computes the order.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron.core.config.errors import ConfigError, DataError
from megatron.core.datasets import helpers
from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron.core.datasets.corpus import Corpus, CorpusOrder
from megatron.core.datasets.fill_in_middle import FillInMiddle
from megatron.core.datasets.index_cache import cached_arrays
from megatron.core.datasets.index_free import DocumentOrder, Piece
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.megatron_dataset import (
    LowLevelDataset,
    MegatronDataset,
    Sample,
    SyntheticDataset,
)
from megatron.core.datasets.packing import PackedDocuments
from megatron.core.datasets.utils import Split
from megatron.core.packed_seq_params import PackedBounds
from megatron.core.progress import Progress


def get_ltor_masks_and_position_ids(
    data: Tensor,
    eod_token: int,
    reset_position_ids: bool,
    reset_attention_mask: bool,
    eod_mask_loss: bool,
    create_attention_mask: bool = True,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return (attention_mask, loss_mask, position_ids) of input tokens ``data`` [..., s].

    attention_mask bool [..., 1, s, s] or None, True where attention is forbidden; loss_mask f32
    [..., s]; position_ids i64 [..., s].  The end-of-document token belongs to the document it ends.
    ``reset_position_ids`` restarts positions after it, ``reset_attention_mask`` hides earlier
    documents from later tokens, ``eod_mask_loss`` sets the loss mask at the token itself to 0.
    """
    is_eod = data == eod_token
    place = torch.arange(data.shape[-1], device=data.device)
    loss_mask = torch.ones(data.shape, device=data.device)
    if eod_mask_loss:
        loss_mask[is_eod] = 0.0
    attention_mask = None
    if create_attention_mask:
        attention_mask = causal_mask(len(place), data.device)
        attention_mask = attention_mask.expand(*data.shape[:-1], *attention_mask.shape)
        if reset_attention_mask:
            ended = is_eod.cumsum(-1) - is_eod.long()  # documents that ended before each token
            other_document = ended.unsqueeze(-1) != ended.unsqueeze(-2)
            attention_mask = attention_mask | other_document.unsqueeze(-3)
    position_ids = place.expand(data.shape).contiguous()
    if reset_position_ids:
        starts = torch.zeros_like(position_ids)
        torch.mul(is_eod[..., :-1], place[1:], out=starts[..., 1:])
        position_ids -= starts.cummax(dim=-1).values
    return attention_mask, loss_mask, position_ids


def causal_mask(sequence_length: int, device: torch.device | None = None) -> Tensor:
    """Return bool [1, s, s], True above the diagonal, where attention is forbidden."""
    ones = torch.ones(1, sequence_length, sequence_length, dtype=torch.bool, device=device)
    return ones.triu(diagonal=1)


logger = logging.getLogger(__name__)

# If a smaller share of the last epoch than this is needed, the last epoch is shuffled separately.
# In a joint shuffle many of its samples would displace samples of the complete epochs.
_SEPARATE_BELOW = 0.80


@dataclass(frozen=True, kw_only=True)
class SampleRequest:
    """Rule for splitting the sequences ``indices`` of a source into samples."""

    source: str  # path prefix and split, for messages
    indices: np.ndarray  # i32, ascending
    sequence_lengths: np.ndarray  # i32, of the whole source
    num_samples: int | None  # minimum number; None for one epoch
    sequence_length: int
    random_seed: int
    drop_last_partial_sequence: bool = True
    add_extra_token_to_sequence: bool = True

    @property
    def extra(self) -> int:
        """Tokens that a sample reads beyond its length: 1 if it includes the label of the last."""
        return int(self.add_extra_token_to_sequence)

    @cached_property
    def tokens_per_epoch(self) -> int:
        """Number of tokens in the sequences ``indices``."""
        if not len(self.indices):
            return 0
        first = int(self.indices[0])
        last = int(self.indices[-1])
        is_range = last - first + 1 == len(self.indices)  # as the builder makes it: no copy
        lengths = self.sequence_lengths[slice(first, last + 1) if is_range else self.indices]
        return int(lengths.sum(dtype=np.int64))

    @property
    def num_epochs(self) -> int:
        """Number of epochs that give ``num_samples``.  Raises DataError without tokens."""
        if self.tokens_per_epoch == 0:
            raise DataError(
                f"{self.source} holds no tokens ({len(self.indices)} sequences, all empty): "
                "give it more data or a larger share in --split"
            )
        if self.num_samples is None:
            return 1
        wanted = self.num_samples * self.sequence_length + self.extra
        return max(1, -(-wanted // self.tokens_per_epoch))


class GPTIndices(NamedTuple):
    """The three index arrays of the module docstring."""

    document_index: np.ndarray
    sample_index: np.ndarray
    shuffle_index: np.ndarray


_SHAPES: dict[str, tuple[int, ...]] = dict(zip(GPTIndices._fields, ((), (2,), ()), strict=True))


def build_indices(request: SampleRequest) -> GPTIndices:
    """Build the index arrays in memory.

    Raises DataError if the split has no tokens, or too few for one sample.
    """
    tokens_per_epoch = request.tokens_per_epoch
    num_epochs = request.num_epochs
    samples_before_last = 0
    is_last_apart = False  # whether the last epoch is shuffled separately
    if num_epochs > 1 and request.num_samples is not None:
        length = request.sequence_length
        samples_before_last = ((num_epochs - 1) * tokens_per_epoch - request.extra) // length
        per_epoch = (tokens_per_epoch - request.extra) // length
        from_last = request.num_samples - samples_before_last
        is_last_apart = from_last < int(_SEPARATE_BELOW * per_epoch)
    random_state = np.random.RandomState(request.random_seed)
    document_index = np.tile(np.asarray(request.indices, np.int32), num_epochs)
    num_before = len(request.indices) * (num_epochs - 1) if is_last_apart else len(document_index)
    _shuffle_parts(document_index, num_before, random_state)
    sample_index = helpers.build_sample_idx(
        request.sequence_lengths,
        document_index,
        request.sequence_length,
        num_epochs,
        tokens_per_epoch,
        request.drop_last_partial_sequence,
        request.add_extra_token_to_sequence,
    )
    num_samples = len(sample_index) - 1
    if num_samples < 1:
        raise _too_few_tokens(request.source, tokens_per_epoch, request.sequence_length)
    fits = num_samples < np.iinfo(np.uint32).max - 1
    shuffle_index = np.arange(num_samples, dtype=np.uint32 if fits else np.int64)
    num_before = samples_before_last if is_last_apart else num_samples
    _shuffle_parts(shuffle_index, num_before, random_state)
    return GPTIndices(document_index, sample_index, shuffle_index)


def _too_few_tokens(source: str, num_tokens: int, length: int) -> DataError:
    return DataError(
        f"{source} holds {num_tokens} tokens, too few for one sample of {length}: give it more "
        "data or a larger share in --split"
    )


def _shuffle_parts(values: np.ndarray, cut: int, random_state: np.random.RandomState) -> None:
    """Shuffle the values before ``cut`` and those after it, each among themselves."""
    helpers.shuffle(values[:cut], random_state)
    if cut < len(values):
        helpers.shuffle(values[cut:], random_state)


@dataclass(kw_only=True)
class GPTDatasetConfig(BlendedMegatronDatasetConfig):
    """Settings of a GPT dataset: length of samples; masks and positions at document boundaries."""

    reset_position_ids: bool | None = None  # restart positions after an end-of-document token
    reset_attention_mask: bool | None = None  # hide earlier documents from a token
    eod_mask_loss: bool | None = None  # no loss where the input is an end-of-document token
    create_attention_mask: bool = True
    mask_as_bounds: bool = False  # attention_mask of reset_attention_mask is a PackedBounds
    drop_last_partial_validation_sequence: bool = True
    add_extra_token_to_sequence: bool = True
    pack_documents: bool = False  # samples hold complete documents and padding
    fill_in_middle: FillInMiddle | None = None  # reorders the documents of a sample

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reset_attention_mask and not self.create_attention_mask:
            raise ConfigError(
                "--reset-attention-mask needs the attention mask that "
                "--no-create-attention-mask-in-dataloader leaves out: give one of the two"
            )


class GPTDataset(MegatronDataset):
    """Samples of one split of an indexed dataset, as dictionaries of tensors.

    Keys: tokens, labels i64 [s]; loss_mask f32 [s]; position_ids i64 [s]; and, with
    ``create_attention_mask``, attention_mask bool [1, s, s] (True = hidden) or, with
    ``mask_as_bounds``, the bounds of its documents.  ``dataset[None]`` is
    a sample with a zero loss mask, which pads an incomplete batch.
    """

    config: GPTDatasetConfig
    dataset: IndexedDataset

    def __init__(
        self,
        indexed_dataset: LowLevelDataset,
        dataset_path: str | None,
        indexed_indices: np.ndarray,
        num_samples: int | None,
        index_split: Split,
        config: GPTDatasetConfig,
    ) -> None:
        super().__init__(
            indexed_dataset, dataset_path, indexed_indices, num_samples, index_split, config
        )
        tokenizer = config.tokenizer
        self._eod: int | None = None
        if config.reset_position_ids or config.reset_attention_mask or config.eod_mask_loss:
            self._eod = tokenizer.eod
        self._vocab_size: int = tokenizer.vocab_size
        pad: Any = getattr(tokenizer, "pad", None)
        is_own = pad is not None and pad >= 0 and pad != getattr(tokenizer, "eod", None)
        self._pad: int | None = int(pad) if is_own else None  # its labels get no loss
        self._masks: Sample = {}  # of every sample, if end-of-document tokens have no effect
        self._num_read = config.sequence_length + int(config.add_extra_token_to_sequence)
        self._order: DocumentOrder | CorpusOrder | PackedDocuments | None = None
        if config.index_free and isinstance(indexed_dataset, IndexedDataset | Corpus):
            self._order = self._index_free_order(indexed_dataset)
            return
        if config.pack_documents and isinstance(indexed_dataset, IndexedDataset):
            self._order = self._packed_documents(indexed_dataset)
            return
        indices = self._build_document_sample_shuffle_indices()
        self.document_index, self.sample_index, self.shuffle_index = indices

    def __len__(self) -> int:
        if self._order is not None:
            count = self._order.samples_per_epoch
            return count if self.num_samples is None else self.num_samples
        return len(self.shuffle_index)

    def __getitem__(self, idx: int | None) -> Sample:
        text, num_real = self._read_sample(0 if idx is None else int(idx))
        tensor = torch.from_numpy(text)
        s = self.config.sequence_length
        tokens = tensor[:s]
        num_labels = num_real - 1
        if self.config.add_extra_token_to_sequence:
            labels = tensor[1:]
        else:
            labels = torch.roll(tensor, -1)
            labels[-1] = 0
        masks = dict(self._masks_of(tokens))
        has_pad = self._pad is not None and bool((text[1:] == self._pad).any())
        if idx is None or num_labels < s or has_pad:
            loss_mask = masks["loss_mask"].clone()
            loss_mask[0 if idx is None else num_labels :] = 0.0
            if has_pad:
                loss_mask[labels == self._pad] = 0.0
            masks["loss_mask"] = loss_mask
        return {"tokens": tokens, "labels": labels, **masks}

    def _masks_of(self, tokens: torch.Tensor) -> Sample:
        if self._masks:
            return self._masks
        config = self.config
        eod = -1 if self._eod is None else self._eod
        as_bounds = config.mask_as_bounds and bool(config.reset_attention_mask)
        attention_mask, loss_mask, position_ids = get_ltor_masks_and_position_ids(
            tokens,
            eod,
            bool(config.reset_position_ids),
            bool(config.reset_attention_mask),
            bool(config.eod_mask_loss),
            config.create_attention_mask and not as_bounds,
        )
        masks: Sample = {"loss_mask": loss_mask, "position_ids": position_ids}
        if attention_mask is not None:
            masks["attention_mask"] = attention_mask
        if as_bounds:
            masks["attention_mask"] = PackedBounds.of_documents(tokens == eod)
        if self._eod is None:  # the masks of all samples
            self._masks = masks
        return masks

    def _read_sample(self, idx: int) -> tuple[np.ndarray, int]:
        """Return token ids i64 [s (+ 1)], padded with 0, and the number of real tokens."""
        text, sequences = self._query_document_sample_shuffle_indices(idx)
        num_real = len(text)
        if num_real and text.view(np.uint64).max() >= self._vocab_size:
            for sequence in sequences.tolist():
                self._check_ids(sequence, self.dataset.get(sequence).astype(np.int64))
        if (reorder := self.config.fill_in_middle) is not None:
            text = reorder.apply(text, self.random_of(idx))
        if num_real < self._num_read:
            text = np.concatenate((text, np.zeros(self._num_read - num_real, np.int64)))
        return text, num_real

    def _query_document_sample_shuffle_indices(self, idx: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the token ids i64 of sample ``idx`` and the numbers of the sequences it reads.

        The last sample of the data may have fewer tokens than the others.
        """
        text = np.empty(self._num_read, np.int64)
        filled = 0
        documents: list[int] = []
        try:
            for document, offset, length in self.pieces(idx):
                piece = self.dataset.get(document, offset, length)
                text[filled : filled + len(piece)] = piece
                filled += len(piece)
                documents.append(document)
        except DataError:  # a ValueError too
            raise
        except (IndexError, MemoryError, TypeError, ValueError) as error:
            if idx >= len(self):
                raise  # the end of a loop over the samples
            prefix = self._cache_prefix(self.index_split.name)
            raise DataError(
                f"{prefix}-*.npy do not belong to {self.dataset_path} ({error}): remove them"
            ) from error
        return text[:filled], np.array(documents)

    def pieces(self, idx: int) -> Iterator[Piece]:
        """Yield sequence, first token and number of tokens of each part of sample ``idx``."""
        return self._indexed_pieces(idx) if self._order is None else self._order.pieces(idx)

    def _indexed_pieces(self, idx: int) -> Iterator[Piece]:
        sample = int(self.shuffle_index[idx])
        bounds = self.sample_index[sample : sample + 2].tolist()
        (first, offset), (last, last_offset) = bounds
        if offset < 0:
            raise IndexError(f"a sample at token {offset}")
        documents = self.document_index[first : last + 1].tolist()
        for document in documents[:-1]:
            yield document, offset, int(self.dataset.sequence_lengths[document]) - offset
            offset = 0
        stop = last_offset + int(self.config.add_extra_token_to_sequence)
        yield documents[-1], offset, stop - offset

    @property
    def _drops_last(self) -> bool:
        """Whether an epoch ends with its last complete sample."""
        is_training = self.index_split != Split.valid
        return is_training or self.config.drop_last_partial_validation_sequence

    def _index_free_order(self, source: IndexedDataset | Corpus) -> DocumentOrder | CorpusOrder:
        settings: dict[str, Any] = {
            "length": self.config.sequence_length,
            "extra": int(self.config.add_extra_token_to_sequence),
            "seed": self.config.random_seed,
            "keeps_rest": not self._drops_last,
        }
        if self.config.pack_documents:
            raise ConfigError(
                "--pack-documents needs the lengths of all documents, which --index-free and text "
                "in --data-path do without: use files of tools/preprocess_data.py and no "
                "--index-free"
            )
        if isinstance(source, Corpus):  # whose indices are a share of each shard
            return CorpusOrder(source, tuple(self.indices), settings)
        order = DocumentOrder(source, int(self.indices[0]), int(self.indices[-1]) + 1, **settings)
        if not order.samples_per_epoch:
            raise _too_few_tokens(self._source, order.tokens_per_epoch, self.config.sequence_length)
        return order

    def _packed_documents(self, source: IndexedDataset) -> PackedDocuments:
        with Progress(f"packing {self._source}"):
            packed = PackedDocuments(
                source,
                int(self.indices[0]),
                int(self.indices[-1]) + 1,
                capacity=self._num_read,
                seed=self.config.random_seed,
            )
            if not packed.samples_per_epoch:
                raise _too_few_tokens(self._source, 0, self.config.sequence_length)
        logger.info("%s: %.2f %% of the positions hold tokens", self._source, 100 * packed.fill)
        return packed

    @property
    def _source(self) -> str:
        return f"the {self.index_split.name} split of {self.dataset_path}"

    def _build_document_sample_shuffle_indices(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Load the index arrays from the cache, or build them.  Not a collective."""
        config = self.config
        drops = self._drops_last
        request = SampleRequest(
            source=self._source,
            indices=self.indices,
            sequence_lengths=self.dataset.sequence_lengths,
            num_samples=self.num_samples,
            sequence_length=config.sequence_length,
            random_seed=config.random_seed,
            drop_last_partial_sequence=drops,
            add_extra_token_to_sequence=config.add_extra_token_to_sequence,
        )

        def build() -> GPTIndices:
            started_at_s = time.perf_counter()
            with Progress(f"building the index of {request.source}"):
                built = build_indices(request)
            elapsed_s = time.perf_counter() - started_at_s
            logger.info("built the index of %s in %.2f s", request.source, elapsed_s)
            return built

        prefix = self._cache_prefix(self.index_split.name)
        # The description has neither of these two settings.
        source = [*self.dataset.identity, drops, config.add_extra_token_to_sequence]
        documents, samples, shuffle = cached_arrays(
            prefix, self.unique_description, _SHAPES, build, source
        )
        logger.info(
            "%s: %d samples, %d tokens an epoch, %d epochs",
            request.source,
            len(shuffle),
            request.tokens_per_epoch,
            request.num_epochs,
        )
        return documents, samples, shuffle


class MockGPTDataset(SyntheticDataset, GPTDataset):
    """Synthetic, learnable samples: token ids of a document count upwards from a random id.

    A sample depends only on the seed, the split and the sample number; it needs no file and no
    index in memory.  Ids are within any vocabulary; documents end with the end-of-document token.
    """

    _MEAN_DOCUMENT_LENGTH = 256

    def __init__(
        self,
        dataset: Any,
        dataset_path: str | None,
        indices: Any,
        num_samples: int | None,
        index_split: Split,
        config: GPTDatasetConfig,
    ) -> None:
        super().__init__(dataset, dataset_path, indices, num_samples, index_split, config)

    def _build_document_sample_shuffle_indices(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        empty = np.empty(0, np.int32)
        return empty, empty, empty

    def _query_document_sample_shuffle_indices(self, idx: int) -> tuple[np.ndarray, np.ndarray]:
        if not 0 <= idx < len(self):
            raise IndexError(f"sample {idx} of {len(self)}")
        n, eod = self._num_read, self.config.tokenizer.eod
        random = self.random_of(idx)
        is_end = random.random(n, np.float32) * self._MEAN_DOCUMENT_LENGTH < 1.0
        ends = np.flatnonzero(is_end)
        starts = np.concatenate(([0], ends + 1))
        usable = max(1, self._vocab_size - 1)  # all ids but the end-of-document token
        firsts = random.integers(usable, size=len(starts))
        lengths = np.diff(starts, append=n)  # 0 for a document that would start after the sample
        text = np.arange(n) + np.repeat(firsts - starts, lengths)
        text %= usable
        text += text >= eod
        text[ends] = eod
        return np.minimum(text, self._vocab_size - 1), starts


class LengthCurriculum(torch.utils.data.Dataset[Sample]):
    """Samples of ``data`` whose contexts grow from ``start`` to all tokens [s].

    Samples keep their tokens and their shape.  Attention and positions begin anew after each
    context of L tokens, as they do after a document, so that each step trains as many tokens at any
    L.  L depends on the number of the sample only: a resumed run, and any layout, reads the same.
    Contexts grow linearly over the first ``num_samples`` samples.  The end-of-document token
    ``eod`` ends a context too.  ``as_bounds``: attention_mask is a PackedBounds, not a tensor.
    """

    def __init__(
        self, data: Any, start: int, num_samples: int, *, eod: int, as_bounds: bool
    ) -> None:
        self._data = data
        self._start = start
        self._num_samples = num_samples
        self._eod = eod
        self._as_bounds = as_bounds

    def __len__(self) -> int:
        return len(self._data)

    def context_length(self, idx: int, sequence_length: int) -> int:
        """Return the most tokens that a token of sample ``idx`` attends to."""
        grown = (sequence_length - self._start) * idx // self._num_samples
        return min(sequence_length, self._start + grown)

    def __getitem__(self, idx: int | None) -> Sample:
        sample: Sample = self._data[idx]
        tokens = sample["tokens"]
        sequence_length = len(tokens)
        length = self.context_length(idx or 0, sequence_length)
        if idx is None or length == sequence_length:
            return sample
        is_end = (torch.arange(1, sequence_length + 1) % length == 0) | (tokens == self._eod)
        mask, _, position_ids = get_ltor_masks_and_position_ids(
            is_end.long(), 1, True, True, False, create_attention_mask=not self._as_bounds
        )
        bounds = PackedBounds.of_documents(is_end) if self._as_bounds else mask
        return {**sample, "position_ids": position_ids, "attention_mask": bounds}

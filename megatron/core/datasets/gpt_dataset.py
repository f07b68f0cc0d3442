"""Training samples for left-to-right models: documents concatenated and split at a fixed length.

A sample is ``sequence_length`` input tokens and, with ``add_extra_token_to_sequence``, one more
token as the label of the last.  A sample may cross document boundaries.  Its tokens depend only on
the data, the seed and the sample number.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
import torch

from megatron.core.config.errors import ConfigError, DataError
from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron.core.datasets.gpt_indices import SampleRequest, load_or_build_indices
from megatron.core.datasets.gpt_masks import causal_mask, get_ltor_masks_and_position_ids
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.megatron_dataset import (
    LowLevelDataset,
    MegatronDataset,
    Sample,
    SyntheticDataset,
)
from megatron.core.datasets.utils import Split
from megatron.core.packed_seq_params import PackedBounds

logger = logging.getLogger(__name__)


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
        self._pad = self._loss_free_pad(tokenizer)
        self._constant_masks = self._eod is None  # the same for every sample: built once
        self._masks: Sample = {}
        self._num_read = config.sequence_length + int(config.add_extra_token_to_sequence)
        indices = self._build_document_sample_shuffle_indices()
        self.document_index, self.sample_index, self.shuffle_index = indices

    @staticmethod
    def _loss_free_pad(tokenizer: object) -> int | None:
        """Return the padding token id, whose labels get no loss.

        None if the tokenizer has no padding token, or uses the end-of-document token for it.
        """
        pad = getattr(tokenizer, "pad", None)
        if pad is None or pad < 0 or pad == getattr(tokenizer, "eod", None):
            return None
        return int(pad)

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: LowLevelDataset) -> int:
        """Return the number of sequences: --split divides sequences, not documents."""
        assert isinstance(low_level_dataset, IndexedDataset)
        return len(low_level_dataset)

    def __len__(self) -> int:
        return len(self.shuffle_index)

    def __getitem__(self, idx: int | None) -> Sample:
        text, num_real = self._read_sample(0 if idx is None else int(idx))
        tensor = torch.from_numpy(text)
        s = self.config.sequence_length
        tokens = tensor[:s]
        if self.config.add_extra_token_to_sequence:
            labels, num_labels = tensor[1:], num_real - 1
        else:
            labels, num_labels = torch.roll(tensor, -1), num_real - 1
            labels[-1] = 0
        masks = dict(self._masks_of(tokens))
        has_pad = self._pad is not None and bool((text[1:] == self._pad).any())
        if idx is None or num_labels < s or has_pad:
            masks["loss_mask"] = self._without_padding(masks["loss_mask"], labels, num_labels)
            if idx is None:
                masks["loss_mask"].zero_()
        return {"tokens": tokens, "labels": labels, **masks}

    def _without_padding(
        self, loss_mask: torch.Tensor, labels: torch.Tensor, num_labels: int
    ) -> torch.Tensor:
        loss_mask = loss_mask.clone()
        loss_mask[num_labels:] = 0.0
        if self._pad is not None:
            loss_mask[labels == self._pad] = 0.0
        return loss_mask

    def _masks_of(self, tokens: torch.Tensor) -> Sample:
        if self._constant_masks and self._masks:
            return self._masks
        config = self.config
        s = config.sequence_length
        if self._constant_masks:
            self._masks = {"loss_mask": torch.ones(s), "position_ids": torch.arange(s)}
            if config.create_attention_mask:
                self._masks["attention_mask"] = causal_mask(s)
            return self._masks
        assert self._eod is not None
        as_bounds = config.mask_as_bounds and bool(config.reset_attention_mask)
        attention_mask, loss_mask, position_ids = get_ltor_masks_and_position_ids(
            tokens,
            self._eod,
            bool(config.reset_position_ids),
            bool(config.reset_attention_mask),
            bool(config.eod_mask_loss),
            config.create_attention_mask and not as_bounds,
        )
        masks: Sample = {"loss_mask": loss_mask, "position_ids": position_ids}
        if attention_mask is not None:
            masks["attention_mask"] = attention_mask
        if as_bounds:
            masks["attention_mask"] = PackedBounds.of_documents(tokens == self._eod)
        return masks

    def _read_sample(self, idx: int) -> tuple[np.ndarray, int]:
        """Return token ids i64 [s (+ 1)], padded with 0, and the number of real tokens."""
        text, _ = self._query_document_sample_shuffle_indices(idx)
        num_real = len(text)
        # As unsigned integers negative ids are large, so one comparison checks both bounds.
        if num_real and text.view(np.uint64).max() >= self._vocab_size:
            raise self._outside_vocabulary(idx, text)
        if num_real < self._num_read:
            text = np.concatenate((text, np.zeros(self._num_read - num_real, np.int64)))
        return text, num_real

    def _query_document_sample_shuffle_indices(self, idx: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the token ids i64 of sample ``idx`` and the numbers of the sequences it reads.

        The last sample of the data may have fewer tokens than the others.
        """
        sample = int(self.shuffle_index[idx])
        (first, first_offset), (last, last_offset) = self.sample_index[sample : sample + 2].tolist()
        documents = self.document_index[first : last + 1]
        text = np.empty(self._num_read, np.int64)
        stop = last_offset + int(self.config.add_extra_token_to_sequence)
        filled = 0
        for document in documents[:-1].tolist():
            piece = self.dataset.get(document, first_offset)
            text[filled : filled + len(piece)] = piece
            filled += len(piece)
            first_offset = 0
        piece = self.dataset.get(int(documents[-1]), first_offset, stop - first_offset)
        text[filled : filled + len(piece)] = piece
        return text[: filled + len(piece)], documents

    def _outside_vocabulary(self, idx: int, text: np.ndarray) -> DataError:
        _, sequences = self._query_document_sample_shuffle_indices(idx)
        wrong = next(int(t) for t in text if not 0 <= t < self._vocab_size)
        holder = next(s for s in sequences.tolist() if wrong in self.dataset.get(s))
        return DataError(
            f"{self.dataset_path}.bin, sequence {holder}: token id {wrong} lies outside the "
            f"vocabulary of {self._vocab_size}: train with the tokenizer that the data was "
            "preprocessed with"
        )

    def _build_document_sample_shuffle_indices(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Load the index arrays from the cache, or build them.  Not a collective."""
        config = self.config
        drops = self.index_split != Split.valid or config.drop_last_partial_validation_sequence
        request = SampleRequest(
            source=f"the {self.index_split.name} split of {self.dataset_path}",
            indices=self.indices,
            sequence_lengths=self.dataset.sequence_lengths,
            num_samples=self.num_samples,
            sequence_length=config.sequence_length,
            random_seed=config.random_seed,
            drop_last_partial_sequence=drops,
            add_extra_token_to_sequence=config.add_extra_token_to_sequence,
        )
        built = load_or_build_indices(
            request, self._cache_prefix(self.index_split.name), self.unique_description
        )
        logger.info(
            "%s: %d samples, %d tokens an epoch, %d epochs",
            request.source,
            len(built.shuffle_index),
            built.tokens_per_epoch,
            built.num_epochs,
        )
        return built.document_index, built.sample_index, built.shuffle_index


class MockGPTDataset(SyntheticDataset, GPTDataset):
    """Synthetic, learnable samples: token ids of a document count upwards from a random id.

    A sample depends only on the seed, the split and the sample number; it needs no file and no
    index in memory.  Ids are within any vocabulary; documents end with the end-of-document token.
    """

    _MEAN_DOCUMENT_LENGTH = 256

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

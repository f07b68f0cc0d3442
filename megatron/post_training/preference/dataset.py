"""Rows of pairs of answers: the chosen and the rejected one follow each other in a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from megatron.core.config.errors import ConfigError
from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron.core.datasets.conversations import Conversation
from megatron.core.datasets.megatron_dataset import Sample
from megatron.core.datasets.row_files import read_row
from megatron.post_training.preference.rows import ANSWERS, pair_of
from megatron.post_training.sft.dataset import (
    MockConversations,
    SFTDataset,
    SFTDatasetConfig,
    SFTLowLevelDataset,
)
from megatron.training.tokenizer.chat import EncodedChat


@dataclass(kw_only=True)
class PreferenceDatasetConfig(SFTDatasetConfig):
    """Settings of `PreferenceDataset`.

    ``references``: path of the data -> log-probability of each answer under the reference model,
    float64 [2 rows]; 0 for other paths.  ``scores_answers``: the last token of each answer carries
    loss, for a reward model, in place of the tokens that the answer consists of.
    """

    references: Mapping[str, np.ndarray] = field(default_factory=dict)
    scores_answers: bool = False


class PairRows(SFTLowLevelDataset):
    """Pairs of conversations of a file or folder, the chosen one first."""

    per_row = len(ANSWERS)
    unit = "pairs"
    encodes = "EncodedPairs"

    def read(self, i: int) -> Sequence[Conversation]:
        """Return the two conversations of row ``i``.  Raises DataError."""
        return read_row(self.rows, i, pair_of)


class ScoredPairRows(PairRows):
    """Pairs whose last tokens carry loss."""

    encodes = "EncodedScoredPairs"

    def encode(self, conversation: Conversation, config: SFTDatasetConfig) -> EncodedChat:
        """Return the tokens, and one more as the label of the last, which alone is trained."""
        tokens = super().encode(conversation, config).tokens
        return EncodedChat(
            np.append(tokens, tokens[-1:]), np.arange(len(tokens) + 1) == len(tokens)
        )


class PreferenceDataset(SFTDataset):
    """Rows of pairs, as many as fit.

    Keys besides those of `SFTDataset`: is_rejected i64 [s], 1 for tokens of a rejected answer;
    reference f32 [s], whose sum over an answer is its log-probability under the reference model.
    """

    config: PreferenceDatasetConfig
    split_unit = "pairs"

    @staticmethod
    def build_low_level_dataset(
        dataset_path: str | None, config: BlendedMegatronDatasetConfig
    ) -> Any:
        """Open the pairs at ``dataset_path``."""
        if dataset_path is None:
            raise ConfigError(
                "no data is named: give --data-path (or data of each split), or --mock-data"
            )
        assert isinstance(config, PreferenceDatasetConfig), "dataset_config made it"
        return (ScoredPairRows if config.scores_answers else PairRows)(dataset_path)

    @property
    def num_answers(self) -> int:
        """Number of answers of all rows of the data, of other splits too."""
        return len(self.encoded.ends)

    def answers(self, idx: int) -> list[int]:
        """Return the numbers of the answers in row ``idx``, in order."""
        return [place.row * len(ANSWERS) + place.turn for place in self.places(idx)]

    def __getitem__(self, idx: int | None) -> Sample:
        sample = super().__getitem__(idx)
        known = self.config.references.get(self.dataset_path or "")
        num_tokens = len(sample["tokens"])
        is_rejected = np.zeros(num_tokens, np.int64)
        reference = np.zeros(num_tokens, np.float32)
        for place in self.places(idx):
            is_rejected[place.start : place.start + place.length] = place.turn
            if known is not None:
                first = place.start + int(self.chat(place).is_trained[1:].argmax())
                reference[first] = known[place.row * len(ANSWERS) + place.turn]
        sample["is_rejected"] = torch.from_numpy(is_rejected)
        sample["reference"] = torch.from_numpy(reference)
        return sample


class MockPreferenceDataset(PreferenceDataset):
    """Synthetic pairs, whose prompts differ."""

    @staticmethod
    def build_low_level_dataset(
        dataset_path: str | None, config: BlendedMegatronDatasetConfig
    ) -> Any:
        """Return a source of pairs that needs no file."""
        return MockConversations(per_row=len(ANSWERS))

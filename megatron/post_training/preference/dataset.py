"""Pairs of answers in fine-tuning data, and rows of them.

A row of the data has ``prompt``, ``chosen`` and ``rejected``: three texts, or three lists of
messages (and ``tools``).  Without a prompt, chosen and rejected are complete: their common
beginning is the prompt.  Rows of ShareGPT have the prompt in ``conversations``, and one message in
chosen and in rejected.  In a row of a batch the chosen and the rejected answer follow each other.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from megatron.core.config.errors import DataError
from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron.core.datasets.conversations import (
    Conversation,
    answered_prompt,
    check_turns,
    keys_of,
    messages_of,
    sharegpt_messages,
    tools_of,
)
from megatron.core.datasets.megatron_dataset import Sample
from megatron.post_training.sft.dataset import (
    MockConversations,
    SFTDataset,
    SFTDatasetConfig,
    SFTLowLevelDataset,
)
from megatron.training.tokenizer.chat import EncodedChat


class Pair(NamedTuple):
    """Two conversations with the same prompt; only the answers carry loss."""

    chosen: Conversation
    rejected: Conversation


ANSWERS = Pair._fields


def pair_of(row: Mapping[str, Any]) -> Pair:
    """Return the pair of a row, checked.  Raises DataError."""
    missing = [name for name in ANSWERS if row.get(name) is None]
    if missing:
        raise DataError(f"a row needs {' and '.join(ANSWERS)}; this one has {keys_of(row)}")
    if row["chosen"] == row["rejected"]:
        raise DataError("chosen and rejected are equal; remove the row")
    prompt = row.get("prompt")
    if prompt is None and row.get("conversations") is not None:
        prompt = list(sharegpt_messages(row))
    are_texts = all(isinstance(row[name], str) for name in ANSWERS)
    if prompt is None and are_texts:
        prompt, *rests = _shared_text(*(row[name] for name in ANSWERS))
        row = dict(zip(ANSWERS, rests, strict=True))
    elif isinstance(prompt, str) and not are_texts:
        prompt = None  # a text beside conversations repeats their first message
    elif prompt is not None:
        row = {**row, **{name: _listed(row[name]) for name in ANSWERS}}
    if prompt is not None:
        return Pair(*(answered_prompt(row, prompt, name) for name in ANSWERS))
    return _pair_of_conversations(row)


def _pair_of_conversations(row: Mapping[str, Any]) -> Pair:
    """Return the pair of complete answers, whose common beginning is the prompt."""
    answers = [messages_of(row[name], name) for name in ANSWERS]
    for messages in answers:
        check_turns(messages)
    same = 0
    for chosen, rejected in zip(*answers, strict=False):
        if chosen != rejected:
            break
        same += 1
    if not same:
        raise DataError("chosen and rejected begin with different messages; give the same prompt")
    tools = tools_of(row)
    return Pair(*(Conversation(messages, tools, first_trained=same) for messages in answers))


def _shared_text(chosen: str, rejected: str) -> tuple[str, str, str]:
    """Return the text that both begin with, and the rest of each: a space belongs to the rest."""
    same = len(os.path.commonprefix((chosen, rejected)))
    if same and chosen[same - 1] == " ":
        same -= 1
    if not same:
        raise DataError("chosen and rejected begin with different texts; give prompt")
    return chosen[:same], chosen[same:], rejected[same:]


def _listed(answer: object) -> object:
    """Return the answer of a row of ShareGPT, one message, as a list."""
    return [answer] if isinstance(answer, Mapping) else answer


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

    def conversations_of(self, row: Mapping[str, Any]) -> Sequence[Conversation]:
        """Return the two conversations of ``row``.  Raises DataError."""
        return pair_of(row)


class ScoredPairRows(PairRows):
    """Pairs whose last tokens carry loss."""

    encodes = "EncodedScoredPairs"

    def encode(self, conversation: Conversation, config: SFTDatasetConfig) -> EncodedChat:
        """Return the tokens, and one more: the label of the last token, the only trained one."""
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

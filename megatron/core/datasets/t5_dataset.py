"""T5 samples (span corruption): spans of the encoder text are replaced; the decoder predicts them.

``e`` and ``d`` are the sequence lengths of encoder and decoder.  Each span is replaced by one
sentinel token, in the order of the tokenizer's ``additional_special_tokens_ids``.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np
from torch import Tensor

from megatron.core.config.errors import ConfigError
from megatron.core.datasets.masked_dataset import (
    CountingSentences,
    MaskedWordPieceDataset,
    MaskedWordPieceDatasetConfig,
    choose_spans,
)
from megatron.core.datasets.megatron_dataset import Sample


@dataclass(kw_only=True)
class T5MaskedWordPieceDatasetConfig(MaskedWordPieceDatasetConfig):
    """Settings of a masked dataset (``sequence_length``: the encoder's) and the decoder length."""

    sequence_length_decoder: int = None  # type: ignore[assignment]  # required, as in Megatron Core

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.sequence_length_decoder or 0) < 3:
            raise ConfigError(
                f"--decoder-seq-length {self.sequence_length_decoder} is too short for a sentinel, "
                "a token and the end: give more"
            )
        if self.masking_do_permutation:
            raise ConfigError("masking_do_permutation is for BERT: T5 takes hidden tokens out")

    @property
    def sequence_length_encoder(self) -> int:
        """Sequence length of the encoder: another name of ``sequence_length``."""
        return self.sequence_length


class T5MaskedWordPieceDataset(MaskedWordPieceDataset):
    """T5 samples as dictionaries of arrays i64, except the scalar ``truncated``.

    text_enc, enc_mask [e]; text_dec, labels, loss_mask, dec_mask [d].  Masks are 1 for tokens and 0
    for padding; labels are -1 at padding.  text_dec is the labels shifted right, starting with BOS,
    or with PAD if the tokenizer has no BOS, as in the published T5.
    """

    config: T5MaskedWordPieceDatasetConfig
    special_tokens = ("pad", "bos", "eos")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sentinels = self._find_sentinels()

    @staticmethod
    def _key_config_attributes() -> list[str]:
        return [*MaskedWordPieceDataset._key_config_attributes(), "sequence_length_decoder"]

    def _special_id(self, name: str) -> int:
        try:
            return super()._special_id(name)
        except AttributeError:
            if name != "bos":
                raise
            return super()._special_id("pad")

    def _find_sentinels(self) -> np.ndarray:
        """Return the ids of the sentinel tokens.

        Raises ConfigError if there are fewer than a sample of maximum length needs on average.
        """
        sentinels = getattr(self.config.tokenizer, "additional_special_tokens_ids", None) or ()
        most = self._num_hidden(self._longest_text)
        words_of_span = float(np.arange(1, len(self._ngram_weights) + 1) @ self._ngram_weights)
        needed = ceil(most / words_of_span)
        if len(sentinels) < needed:
            raise ConfigError(
                f"--vocab-extra-ids gives {len(sentinels)} sentinels, and samples of "
                f"{self._longest_text} tokens with --mask-prob {self.config.masking_probability} "
                f"hide {needed} spans or more: give --vocab-extra-ids {max(most, 100)} and a "
                "tokenizer that heeds it (BertWordPiece..., SentencePieceTokenizer, "
                "HuggingFaceTokenizer)"
            )
        return np.array(sentinels, np.int64)

    def _sample(
        self, sentences: list[np.ndarray], target_length: int, random: np.random.Generator
    ) -> Sample:
        text = np.concatenate(sentences)
        numbers = np.repeat(np.arange(len(sentences)), [len(tokens) for tokens in sentences])
        tokens, sentence = text[:target_length], numbers[:target_length]
        d = self.config.sequence_length_decoder
        spans = choose_spans(
            self._words(tokens, sentence),
            self._num_hidden(len(tokens)),
            self._ngram_weights,
            random,
            most_spans=len(self._sentinels),
            most_with_marks=d - 1,  # leaves one position for EOS
        )
        kept, said, at = [], [], 0
        for i, (first, end) in enumerate(spans):
            sentinel = self._sentinels[i : i + 1]
            kept += [tokens[at:first], sentinel]
            said += [sentinel, tokens[first:end]]
            at = end
        ids = self._ids
        encoder = np.concatenate([*kept, tokens[at:]])
        labels = np.concatenate([*said, [ids["eos"]]])
        decoder = np.concatenate([[ids["bos"]], labels[:-1]])
        dec_mask = (np.arange(d) < len(labels)).astype(np.int64)
        e = self.config.sequence_length
        return {
            "text_enc": np.pad(encoder, (0, e - len(encoder)), constant_values=ids["pad"]),
            "text_dec": np.pad(decoder, (0, d - len(decoder)), constant_values=ids["pad"]),
            "labels": np.pad(labels, (0, d - len(labels)), constant_values=-1),
            "loss_mask": dec_mask.copy(),
            "truncated": int(len(text) > target_length),
            "enc_mask": (np.arange(e) < len(encoder)).astype(np.int64),
            "dec_mask": dec_mask,
        }

    @staticmethod
    def config_attention_mask(
        encoder_tokens: Tensor,
        decoder_tokens: Tensor,
        encoder_mask: Tensor,
        decoder_mask: Tensor,
        use_local: bool = False,
        test_te_version: str | None = None,
    ) -> tuple[Tensor, None, Tensor]:
        """Return masks of encoder, decoder and cross attention: bool [b, 1, 1, e], True = hidden.

        They come from the encoder's padding mask [b, e].  The decoder mask is None: the decoder is
        causal and its padding is at the end.  The other arguments are unused; Megatron-LM has them.
        """
        is_hidden = encoder_mask[:, None, None, :] < 0.5
        return is_hidden, None, is_hidden


class MockT5MaskedWordPieceDataset(CountingSentences, T5MaskedWordPieceDataset):
    """Synthetic T5 samples; ids at the end of the vocabulary replace sentinels it does not have."""

    def _find_sentinels(self) -> np.ndarray:
        if getattr(self.config.tokenizer, "additional_special_tokens_ids", None):
            return super()._find_sentinels()
        count = min(self._num_hidden(self._longest_text), self._num_text_ids // 2)
        return np.array([self._make_up_id() for _ in range(count)], np.int64)

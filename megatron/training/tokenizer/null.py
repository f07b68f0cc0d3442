"""NullTokenizer and NullMultimodalTokenizer: the text consists of ids, written in decimal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron.core.config.errors import ConfigError
from megatron.training.tokenizer.base import MegatronTokenizer

_IMAGE_TOKEN = "<image>"
_IMAGE_TOKEN_ID = -200  # outside the vocabulary: the model inserts image features


class _NullTokenizer(MegatronTokenizer):
    """Tokenizer of ids 0 to ``vocab_size`` - 1; the id ``vocab_size`` is EOD."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(None, vocab_size=vocab_size)
        self._num_ids = int(vocab_size)

    def tokenize(self, text: str) -> list[int]:
        try:
            return [int(word) for word in text.split()]
        except ValueError as error:
            raise ConfigError(f"{self.name} reads ids in decimal: {error}") from error

    def detokenize(self, ids: Sequence[int]) -> str:
        return " ".join(str(index) for index in ids)

    def offsets(self, ids: Sequence[int], text: str) -> list[int]:
        starts = [0]
        for index in ids[:-1]:
            starts.append(starts[-1] + len(str(index)) + 1)
        return starts[: len(ids)]

    @property
    def vocab(self) -> Mapping[str, int]:
        return {str(index): index for index in range(self._num_ids)} | {"<eod>": self._num_ids}

    @property
    def vocab_size(self) -> int:
        return self._num_ids + 1

    def _special(self, role: str) -> int:
        return self._num_ids if role == "eod" else super()._special(role)

    @property
    def additional_special_tokens_ids(self) -> list[int] | None:
        """None: EOD is the only special token."""
        return None


class _NullMultimodalTokenizer(_NullTokenizer):
    """NullTokenizer with a token that stands for an image."""

    def __init__(
        self, vocab_size: int, image_token: str | None = None, image_token_id: int | None = None
    ) -> None:
        super().__init__(vocab_size)
        self._image_token = _IMAGE_TOKEN if image_token is None else image_token
        self._image_token_id = _IMAGE_TOKEN_ID if image_token_id is None else image_token_id

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> int | list[int]:
        """Return the id of a word, or of each of several, including the image token."""
        if isinstance(tokens, str):
            is_image = tokens == self._image_token
            return self._image_token_id if is_image else self.tokenize(tokens)[0]
        return [self._image_token_id if t == self._image_token else int(t) for t in tokens]

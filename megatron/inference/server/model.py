"""The model as the front end needs it: its tokenizer, its limits and its special tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

from megatron.core.config.errors import DataError
from megatron.core.inference.sampling_params import SamplingParams
from megatron.core.limited_processes import ProcessFailed
from megatron.inference.image_prompts import ImageInput, ImagePrompts
from megatron.inference.server.engine_link import EngineInfo
from megatron.inference.server.fields import ApiError
from megatron.inference.server.workers import (
    READ_ERRORS,
    LimitedImageProcessor,
    LimitedTokenizer,
    apply_tokenizer,
)
from megatron.training.tokenizer import MegatronTokenizer, TokenizerSpec, create_tokenizer
from megatron.training.tokenizer.multimodal_tokenizer import MultimodalTokenizer

_LONG_TEXT = 2000  # characters or ids of a request; more are for another process
_AT_ONCE = 4  # processes that tokenize


@dataclass(frozen=True, eq=False)
class Model:
    """The served model."""

    info: EngineInfo
    tokenizer: MegatronTokenizer = field(repr=False)
    image_prompts: ImagePrompts | None = field(default=None, repr=False)

    @classmethod
    def of(cls, info: EngineInfo) -> Model:
        """Build the tokenizer of the engine's model."""
        tokenizer = create_tokenizer(TokenizerSpec(**info.tokenizer))
        if info.images is None:
            return cls(info, tokenizer)
        images = ImageInput.from_json(info.images)
        processor = LimitedImageProcessor(images.settings)
        return cls(info, tokenizer, ImagePrompts(images, tokenizer, processor.read))

    def decode(self, ids: list[int]) -> str:
        """Return the text of ``ids``; ids of the vocabulary's padding have none."""
        return self.tokenizer.detokenize(self._known(ids))

    async def decode_all(self, rows: Sequence[list[int]]) -> list[str]:
        """Return the text of each of some lists of ids, which may be long."""
        return await self._apply("detokenize", [*map(self._known, rows)], "tokens")

    def _known(self, ids: list[int]) -> list[int]:
        """Return the ids that the tokenizer has."""
        known = self.tokenizer.vocab_size
        return ids if not ids or max(ids) < known else [i for i in ids if i < known]

    @lru_cache(maxsize=1 << 16)  # noqa: B019  (one model in a process)
    def token_text(self, token: int) -> str:
        """Return the text of one token."""
        return self.decode([token])

    def end_tokens(self, params: SamplingParams) -> frozenset[int]:
        """Return the tokens that end a text."""
        eod = () if params.ignore_eos or self.info.eod is None else (self.info.eod,)
        return frozenset((*eod, *params.stop_token_ids))

    async def tokenize(
        self, texts: Sequence[str], param: str = "prompt", *, is_plain: bool = False
    ) -> list[list[int]]:
        """Return the ids of each text; a plain one has no special tokens around it.

        Raises ApiError if the tokenizer cannot read one.
        """
        kind = "tokenize_plain" if is_plain else "tokenize"
        return await self._apply(kind, list(texts), param)

    def check_characters(self, text: str, param: str) -> None:
        """Raise ApiError for a prompt that is too long for any tokens."""
        if len(text) > self.most_characters:
            raise ApiError(
                f"{param}: a text has {len(text)} characters; {self.info.max_sequence_length} "
                f"tokens, this model's maximum context length, have {self.most_characters} at "
                "most: shorten it",
                param,
                code="context_length_exceeded",
            )

    @cached_property
    def most_characters(self) -> int:
        """Number of characters of a prompt, at most."""
        return self.info.max_sequence_length * self.longest_token

    @cached_property
    def longest_token(self) -> int:
        """Number of characters of the longest token, at least."""
        return max(map(len, self.tokenizer.vocab)) + 1  # and a blank, which is part of none

    async def _apply(self, kind: str, items: list[Any], param: str) -> list[Any]:
        """Call a method of the tokenizer for each item; long ones in another process."""
        size = sum(map(len, items))
        try:
            if size <= _LONG_TEXT:
                return apply_tokenizer(self.tokenizer, kind, items)
            async with self._places[size > self.most_characters]:
                return await asyncio.to_thread(self._elsewhere.apply, kind, items)
        except (*READ_ERRORS, ProcessFailed) as error:
            raise ApiError(f"{param}: the tokenizer cannot read it: {error}", param) from None

    @cached_property
    def _elsewhere(self) -> LimitedTokenizer:
        return LimitedTokenizer(self.info.tokenizer, self.info.modules)

    @cached_property
    def _places(self) -> tuple[asyncio.Semaphore, asyncio.Semaphore]:
        """Places for texts of prompts, and one for longer ones, for which prompts do not wait."""
        return asyncio.Semaphore(_AT_ONCE), asyncio.Semaphore(1)

    def close(self) -> None:
        """End the processes."""
        self._elsewhere.close()

    def special_text(self, role: str) -> str | None:
        """Return the text of a special token; None if the tokenizer does not read it as one."""
        token = self.tokenizer.id_of(role)
        text = None if token is None else self.tokenizer.inv_vocab.get(token)
        try:
            return text if text and self.tokenizer.tokenize_plain(text) == [token] else None
        except READ_ERRORS:  # NullTokenizer reads numbers only
            return None

    def turns(self, messages: list[dict[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """Return messages for a chat template, with the additions of the prompt format.

        Raises ApiError if the format cannot render them.
        """
        if not isinstance(self.tokenizer, MultimodalTokenizer):
            return messages
        try:
            return self.tokenizer.turns(messages)
        except DataError as error:
            raise ApiError(f"messages: {error}", "messages") from None

    @cached_property
    def newlines_after_colons(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The tokens whose text ends with a colon, and those that begin a line."""
        known = min(self.info.vocab_size, self.tokenizer.vocab_size)
        texts = [self.decode([token]) for token in range(known)]
        return (
            tuple(token for token, text in enumerate(texts) if text.endswith(":")),
            tuple(token for token, text in enumerate(texts) if text.startswith("\n")),
        )

    def with_one_bos(self, ids: Sequence[int]) -> list[int]:
        """Return ``ids`` without a BOS of the tokenizer before the BOS of a chat template."""
        bos = self.tokenizer.id_of("bos")
        return list(ids[1:] if bos is not None and list(ids[:2]) == [bos, bos] else ids)

"""Sampling parameters, and the cache of sequences of equal length."""

from __future__ import annotations

import pytest
import torch

from megatron.core.config.errors import ConfigError
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.inference.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"min_p": 1.5}, "--min-p 1.5"),
        ({"temperature": -1.0}, "--temperature -1.0"),
        ({"top_p": 1.5}, "--top-p 1.5"),
        ({"top_k": -3}, "--top-k -3"),
    ],
)
def test_what_cannot_be_is_refused(values: dict[str, float], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        SamplingParams(**values)


def test_the_cache_returns_all_tokens_and_refuses_too_many() -> None:
    cache = StaticInferenceContext(1, 4)
    key = torch.arange(3.0).view(3, 1, 1, 1)

    def seen(
        query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *_: object, **__: object
    ) -> torch.Tensor:
        return torch.stack([keys, values]).flatten(1)

    def attend(key: torch.Tensor, value: torch.Tensor) -> list[list[float]]:
        found: list[list[float]] = cache.attend(0, key, key, value, seen).tolist()
        return found

    assert attend(key, key) == [[0, 1, 2]] * 2
    cache.increment_sequence_len_offset(3)
    assert attend(key[:1] + 9, key[:1] + 7) == [[0, 1, 2, 9], [0, 1, 2, 7]]
    cache.increment_sequence_len_offset(1)
    with pytest.raises(ValueError, match="5 tokens do not fit into a cache of 4"):
        attend(key[:1], key[:1])

"""How the next token is chosen."""

from __future__ import annotations

import pytest
import torch

from megatron.core.config.errors import ConfigError
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.inference.sampling import keep_top_k, keep_top_p, sample
from megatron.core.inference.sampling_params import SamplingParams

LOGITS = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))


def draws(params: SamplingParams, number: int = 4000) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    chosen = sample(LOGITS.expand(number, 4), params, generator)
    return torch.bincount(chosen, minlength=4) / number


def test_greedy_takes_the_likeliest_and_the_smallest_id_of_a_tie() -> None:
    tie = torch.tensor([[0.0, 2.0, 2.0]])
    for params in (SamplingParams(temperature=0.0), SamplingParams(top_k=1)):
        assert sample(tie, params, torch.Generator()).tolist() == [1]


def test_frequencies_follow_the_probabilities() -> None:
    torch.testing.assert_close(draws(SamplingParams()), LOGITS.exp()[0], atol=0.03, rtol=0)


def test_a_low_temperature_sharpens() -> None:
    expected = torch.softmax(LOGITS[0] / 0.5, -1)
    torch.testing.assert_close(draws(SamplingParams(temperature=0.5)), expected, atol=0.03, rtol=0)


def test_top_k_keeps_k_tokens() -> None:
    assert torch.isfinite(keep_top_k(LOGITS, 2)).tolist() == [[True, True, False, False]]
    assert draws(SamplingParams(top_k=2))[2:].sum() == 0


@pytest.mark.parametrize(("p", "kept"), [(0.4, 1), (0.5, 1), (0.6, 2), (0.9, 3), (1.0, 4)])
def test_top_p_keeps_the_smallest_set_that_reaches_p(p: float, kept: int) -> None:
    shuffled = LOGITS[:, [3, 1, 0, 2]]
    assert torch.isfinite(keep_top_p(shuffled, p)).sum() == kept
    assert torch.isfinite(keep_top_p(shuffled, p))[0, 2]  # the likeliest is always in


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
    cache.advance(3)
    assert attend(key[:1] + 9, key[:1] + 7) == [[0, 1, 2, 9], [0, 1, 2, 7]]
    cache.advance(1)
    with pytest.raises(ValueError, match="5 tokens do not fit into a cache of 4"):
        attend(key[:1], key[:1])

"""The sampler against the logits processors of transformers: sets of tokens and frequencies."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron.core.inference.paged_engine.choice import Blocks, scale_of
from megatron.core.inference.paged_engine.sampler import Sampler
from megatron.core.inference.paged_engine.step_plan import SAMPLE, Admission, Segment, StepPlan
from tests.support import selection
from tests.unit.inference.test_sampler import CPU

transformers = pytest.importorskip("transformers")

PROMPT = [3, 17, 17, 40]


def processed(logits: Tensor, params: dict[str, float]) -> Tensor:
    """Return ``logits`` [r, v] as transformers would sample from them."""
    chain = transformers.LogitsProcessorList()
    if "repetition_penalty" in params:
        penalty = params["repetition_penalty"]
        chain.append(transformers.RepetitionPenaltyLogitsProcessor(penalty))
    if "temperature" in params:
        chain.append(transformers.TemperatureLogitsWarper(params["temperature"]))
    if "top_k" in params:
        chain.append(transformers.TopKLogitsWarper(int(params["top_k"])))
    if "top_p" in params:
        chain.append(transformers.TopPLogitsWarper(params["top_p"]))
    if "min_p" in params:
        chain.append(transformers.MinPLogitsWarper(params["min_p"]))
    found: Tensor = chain(torch.tensor([PROMPT]).expand(len(logits), -1), logits)
    return found


@pytest.mark.parametrize("vocab", [50, 5000])
def test_filters_keep_the_tokens_that_transformers_keeps(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    choices = {
        "temperature": [None, 0.3, 1.7],
        "top_k": [None, 2, 7, 300],
        "top_p": [None, 0.05, 0.5, 0.93],
        "min_p": [None, 0.01, 0.3],
    }
    for values in itertools.product(*choices.values()):
        params = {k: v for k, v in zip(choices, values, strict=True) if v is not None}
        logits = torch.randn(4, vocab, generator=generator) * 2
        rows = np.ones(4, dtype=np.float32)
        scaled = scale_of(
            Blocks.of(logits),
            rows * np.float32(params.get("temperature", 1)),
            rows.astype(np.int64) * min(int(params.get("top_k", vocab)), vocab),
            rows * np.float32(params.get("top_p", 1)),
            rows * np.float32(params.get("min_p", 0)),
            torch.from_numpy,
        )(logits)
        assert torch.equal(scaled.isfinite(), processed(logits, params).isfinite()), params


def counts_of(logits: Tensor, params: dict[str, float], number: int) -> Tensor:
    """Return how often each token of ``logits`` [v] is sampled, with different seeds."""
    slots = 5000
    vocab = len(logits)
    sampler = Sampler(slots, vocab, CPU)
    nothing = np.zeros(0, dtype=np.int64)
    seen = torch.zeros(vocab)
    for start in range(3, 3 + number // slots):
        if start == 3 or "repetition_penalty" in params:  # which looks at the text so far
            for slot in range(slots):
                values = {**params, "seed": slot}
                sampler.admit(Admission(slot, values, tuple(PROMPT), len(PROMPT)))
        row = (np.array([40]), nothing, np.array([SAMPLE]))
        plan = StepPlan([Segment(slot, start, *row) for slot in range(slots)])
        found = sampler.sample(logits.expand(slots, -1), plan)
        seen += torch.bincount(torch.from_numpy(found.tokens), minlength=vocab)
    return seen


@pytest.mark.feature(
    "Generation: sampled tokens have the probabilities of transformers' processors"
)
@pytest.mark.parametrize(
    "params",
    selection.first(
        2,
        [
            {"temperature": 1.3, "top_k": 40, "top_p": 0.9},
            {"min_p": 0.02},
            {},
            {"temperature": 0.4},
            {"temperature": 2.5, "top_k": 30},
            {"top_p": 0.8},
            {"top_k": 60, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.8},
        ],
    ),
    ids=str,
)
def test_frequencies_are_the_probabilities_of_transformers(params: dict[str, float]) -> None:
    number = 100_000
    logits = torch.randn(150, generator=torch.Generator().manual_seed(7)) * 2
    seen = counts_of(logits, params, number)
    expected = torch.softmax(processed(logits[None], params)[0], -1) * number
    assert not seen[expected == 0].any()
    often = expected >= 5
    statistic = ((seen - expected) ** 2 / expected)[often].sum().item()
    free = int(often.sum()) - 1
    assert abs(statistic - free) < 4.5 * math.sqrt(2 * free)

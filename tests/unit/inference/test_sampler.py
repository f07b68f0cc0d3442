"""The sampler: which token each output row of a step gets, and its log-probability."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron.core.inference.paged_engine.choice import exponentials, row_keys
from megatron.core.inference.paged_engine.sampler import Sampler, log_probs_of
from megatron.core.inference.paged_engine.step_plan import (
    NO_TOKEN,
    SAMPLE,
    Admission,
    Segment,
    StepOutput,
    StepPlan,
)
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from tests.support.one_process import one_rank

CPU = torch.device("cpu")
EOD = 0


def segment(slot: int, position: int, *targets: int) -> Segment:
    """Return a segment whose last target is the token at ``position``."""
    end = position - 1
    nothing = np.zeros(0, dtype=np.int64)
    tokens = np.zeros(len(targets), dtype=np.int64)
    return Segment(slot, end - len(targets) + 1, tokens, nothing, np.array(targets, np.int64))


def sampler_of(vocab_size: int, *requests: dict[str, object], **more: object) -> Sampler:
    """Return a sampler with a request in each slot, whose prompts have 3 tokens."""
    sampler = Sampler(len(requests), vocab_size, CPU, EOD)
    for slot, params in enumerate(requests):
        sampler.admit(Admission(slot, {"seed": 1, **params}, num_prompt=3, **more))  # type: ignore
    return sampler


def step(
    sampler: Sampler, logits: Tensor, segments: Sequence[Segment], **more: object
) -> StepOutput:
    return sampler.sample(logits, StepPlan(list(segments), **more))  # type: ignore


def test_only_allowed_tokens_are_chosen() -> None:
    ids = [3, 33, 49]
    sampler = sampler_of(50, {"allowed_token_ids": ids}, {"temperature": 0.0})
    logits = torch.randn(2, 50)
    logits[:, 7] = 50.0
    found = set()
    for position in range(3, 60):
        result = step(sampler, logits, [segment(0, position, SAMPLE), segment(1, position, SAMPLE)])
        found.add(int(result.tokens[0]))
        assert result.tokens[1] == 7
    assert found == {*ids}
    sampler.admit(Admission(0, {"temperature": 0.0}, num_prompt=3))
    assert step(sampler, logits[:1], [segment(0, 3, SAMPLE)]).tokens.tolist() == [7]


def test_a_bad_word_is_never_completed() -> None:
    words = [[5], [7, 8, 9], [7, 7]]
    sampler = sampler_of(50, {"temperature": 0.0, "bad_words": words}, history=(1, 7, 8))
    orders = [[5, 9, 1], [7, 1], [7, 8], [9, 2], [9, 3]]
    tokens = []
    for position, order in enumerate(orders, 3):
        logits = torch.zeros(1, 50)
        for value, token in enumerate(reversed(order), 1):
            logits[0, token] = float(value)
        tokens += step(sampler, logits, [segment(0, position, SAMPLE)]).tokens.tolist()
    # 9 after the prompt's 7, 8: only generated tokens count; 9 after the generated 7, 8 is hidden.
    assert tokens == [9, 7, 8, 2, 9]


def test_greedy_takes_the_likeliest_and_the_smallest_id_of_a_tie() -> None:
    sampler = sampler_of(4, {"temperature": 0.0}, {"top_k": 1})
    logits = torch.tensor([[0.0, 2.0, 2.0, -1.0], [0.0, 1.0, 3.0, 3.0]])
    result = step(sampler, logits, [segment(0, 3, SAMPLE), segment(1, 3, SAMPLE)])
    assert result.tokens.tolist() == [1, 2]
    assert result.log_probs.tolist() == [0, 0]  # nobody asks for them
    assert result.top_tokens.shape == (2, 0)


@pytest.mark.feature("Generation: a seed gives the same tokens in any batch")
def test_a_token_depends_on_seed_and_position_not_on_the_batch() -> None:
    requests = [
        {"seed": 5},
        {"seed": 6, "top_k": 20, "temperature": 2.0},
        {"seed": 7, "top_p": 0.9},
        {"seed": 8, "temperature": 0.0},
        {"seed": 9, "min_p": 0.01, "top_p": 0.8, "top_k": 7},
        {"seed": 10, "repetition_penalty": 1.3, "logit_bias": {"3": 2.0}},
    ]
    logits = torch.randn(6, 1000, generator=torch.Generator().manual_seed(0)) * 3
    for position in range(3, 40):
        order = torch.randperm(6, generator=torch.Generator().manual_seed(position)).tolist()
        sampler = sampler_of(1000, *requests)
        segments = [segment(slot, position, SAMPLE) for slot in order]
        together = step(sampler, logits[order], segments).tokens
        for slot, token in zip(order, together.tolist(), strict=True):
            sampler = sampler_of(1000, *requests)
            alone = step(sampler, logits[slot : slot + 1], [segment(slot, position, SAMPLE)])
            assert alone.tokens.tolist() == [token]


def test_a_row_with_a_target_gets_the_log_probability_of_the_model() -> None:
    sampler = sampler_of(50, {"temperature": 0.1, "logit_bias": {"7": 5.0}, "top_n_logprobs": 2})
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    result = step(sampler, logits, [segment(0, 5, 7, 8, SAMPLE)])
    expected = torch.log_softmax(logits, -1)
    token = result.tokens[2]
    assert result.tokens.tolist()[:2] == [7, 8]
    wanted = [expected[0, 7], expected[1, 8], expected[2, token]]
    np.testing.assert_allclose(result.log_probs, wanted, atol=1e-6)
    assert result.top_tokens[2].tolist() == logits[2].topk(2).indices.tolist()
    np.testing.assert_allclose(result.top_log_probs[2], expected[2].topk(2).values, atol=1e-6)


def test_likely_tokens_of_equal_logits_come_in_the_order_of_their_ids() -> None:
    sampler = sampler_of(200, {"temperature": 0.0, "top_n_logprobs": 5})
    logits = torch.zeros(1, 200)
    logits[0, 100] = 1
    logits[0, 3] = -0.0
    result = step(sampler, logits, [segment(0, 3, SAMPLE)])
    assert result.top_tokens.tolist() == [[100, 0, 1, 2, 3]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_finite_logits_gets_no_token_and_others_theirs(temperature: float) -> None:
    sampler = sampler_of(300, *[{"temperature": temperature, "return_log_probs": True}] * 5)
    logits = torch.randn(5, 300)
    logits[0, 17] = float("nan")
    logits[1] = float("-inf")
    logits[2, 4] = float("inf")
    logits[3, 5] = 60
    segments = [segment(slot, 3, SAMPLE) for slot in range(4)]
    result = step(sampler, logits, [*segments, segment(4, 3, 9)])
    assert result.tokens.tolist() == [NO_TOKEN, NO_TOKEN, NO_TOKEN, 5, 9]
    assert np.isfinite(result.log_probs).all()


def test_a_target_of_a_row_with_nan_becomes_no_token() -> None:
    sampler = sampler_of(30, {})
    result = step(sampler, torch.full((1, 30), float("nan")), [segment(0, 3, 9)])
    assert result.tokens.tolist() == [NO_TOKEN]


def test_end_tokens_are_hidden_until_min_tokens() -> None:
    params = {"temperature": 0.0, "min_tokens": 2, "stop_token_ids": [2]}
    sampler = sampler_of(4, params)
    logits = torch.tensor([[5.0, 1.0, 4.0, 3.0]])
    found = [step(sampler, logits, [segment(0, at, SAMPLE)]).tokens.item() for at in (3, 4, 5)]
    assert found == [3, 3, EOD]


@pytest.mark.parametrize(
    ("params", "numbers"),
    [
        ({"top_p_decay": 0.6}, [3, 2, 1, 1]),
        ({"top_p_decay": 0.6, "top_p_bound": 0.6}, [3, 2, 2, 2]),
        ({}, [3, 3, 3, 3]),
        ({"top_p": 0.0, "top_p_decay": 0.6}, [4, 4, 4, 4]),
    ],
)
def test_top_p_decays_from_token_to_token(params: dict[str, object], numbers: list[int]) -> None:
    many = [{"top_p": 0.9, **params, "seed": seed} for seed in range(300)]
    sampler = sampler_of(4, *many, {"top_p": 0.9, "seed": 1})  # the last one never decays
    logits = torch.tensor([[0.45, 0.3, 0.2, 0.05]]).log().repeat(len(many), 1)
    for position, number in enumerate(numbers, start=3):
        segments = [segment(slot, position, SAMPLE) for slot in range(len(many))]
        assert {*step(sampler, logits, segments).tokens.tolist()} == {*range(number)}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_forbidden_tokens_do_not_follow(temperature: float) -> None:
    params = {"temperature": temperature, "forbidden_after": [[7, 8], [1, 2]]}
    sampler = sampler_of(9, params, {"temperature": temperature}, {**params, "top_k": 1})
    logits = torch.full((3, 9), -100.0)
    logits[:, :4] = torch.tensor([3.0, 9.0, 8.0, 5.0])
    for token, expected in ((7, 3), (8, 3), (6, 1)):
        parts = [segment(i, 3, SAMPLE)._replace(tokens=np.array([token])) for i in range(3)]
        found = step(sampler, logits, parts).tokens.tolist()
        assert found[2] == expected
        assert (found[0] in (1, 2)) == (expected == 1)
        assert found[1] in (1, 2)
    sampler.admit(Admission(0, {"temperature": 0.0, "seed": 1}, num_prompt=3))
    part = parts[0]._replace(tokens=np.array([7]))
    assert step(sampler, logits[:1], [part]).tokens.tolist() == [1]


@pytest.mark.parametrize("temperature", [0.0, 1e-300, 5.0, 1e300])
def test_only_tokens_of_the_mask_are_chosen(temperature: float) -> None:
    sampler = sampler_of(70, {"temperature": temperature}, {"temperature": temperature, "seed": 3})
    words = np.array([1 << 9, -(2**31), 0], dtype=np.int64)
    for position in range(3, 60):
        logits = torch.randn(2, 70) * 3
        segments = [segment(0, position, SAMPLE), segment(1, position, SAMPLE)]
        result = step(sampler, logits, segments, masks={1: words})
        assert result.tokens[1] in (9, 63)
    result = step(sampler, logits, segments, masks={1: words * 0})
    assert result.tokens[1] == NO_TOKEN
    assert result.tokens[0] != NO_TOKEN


def test_columns_of_padding_count_in_probabilities_but_are_never_chosen() -> None:
    sampler = sampler_of(4, {"temperature": 0.0, "return_log_probs": True, "top_n_logprobs": 2})
    logits = torch.tensor([[0.0, 0.0, 1.0, 0.0, 9.0, 5.0]])
    result = step(sampler, logits, [segment(0, 3, SAMPLE)])
    assert result.tokens.tolist() == [2]
    assert result.log_probs[0] == pytest.approx(torch.log_softmax(logits[0], -1)[2].item())
    assert result.top_tokens.tolist() == [[2, 0]]


def test_a_step_without_output_rows_gives_an_empty_result() -> None:
    result = step(sampler_of(4, {}), torch.zeros(0, 4), [])
    assert result.tokens.shape == (0,)


def test_penalties_follow_the_tokens_that_were_sampled() -> None:
    """The same request in plain Python: counts in a list, one token after the other."""
    vocab = 12
    prompt = [3, 3, 5]
    repetition = 1.5
    presence = 0.4
    frequency = 0.7
    params = {
        "temperature": 0.0,
        "repetition_penalty": repetition,
        "presence_penalty": presence,
        "frequency_penalty": frequency,
    }
    sampler = Sampler(3, vocab, CPU, EOD)
    sampler.admit(Admission(0, {"temperature": 0.0, "seed": 1}))
    sampler.admit(Admission(2, {**params, "seed": 1}, tuple(prompt), 3))
    text = list(prompt)
    generator = torch.Generator().manual_seed(4)
    for position in range(3, 60):
        logits = torch.randn(2, vocab, generator=generator)
        plain = logits[1].tolist()
        for token in range(vocab):
            if token in text:
                plain[token] *= repetition if plain[token] <= 0 else 1 / repetition
            count = text[3:].count(token)
            plain[token] -= presence * (count > 0) + frequency * count
        result = step(sampler, logits, [segment(0, 3, SAMPLE), segment(2, position, SAMPLE)])
        assert result.tokens.tolist() == [int(logits[0].argmax()), int(np.argmax(plain))]
        text.append(int(result.tokens[1]))
        if position == 30:  # a request that was pre-empted is admitted again, in another slot
            sampler.admit(Admission(1, {"seed": 1}))
            sampler.admit(Admission(2, {**params, "seed": 1}, tuple(text), 3))


@pytest.mark.parametrize(("penalty", "token"), [(1e300, 3), (1e-300, 2)])
def test_extreme_repetition_penalties_decide(penalty: float, token: int) -> None:
    sampler = Sampler(1, 4, CPU, EOD)
    params = {"temperature": 0.0, "seed": 1, "repetition_penalty": penalty}
    sampler.admit(Admission(0, params, (0, 1, 2), 3))
    logits = torch.tensor([[0.0, 1.0, 2.0, 1.5]])
    assert step(sampler, logits, [segment(0, 3, SAMPLE)]).tokens.tolist() == [token]


def test_a_slot_forgets_the_request_before() -> None:
    sampler = sampler_of(4, {"temperature": 0.0, "logit_bias": {"1": 9.0}, "min_tokens": 90})
    logits = torch.tensor([[4.0, 0.0, 1.0, 0.0]])
    assert step(sampler, logits, [segment(0, 3, SAMPLE)]).tokens.tolist() == [1]
    sampler.admit(Admission(0, {"temperature": 0.0, "seed": 1}))
    assert step(sampler, logits, [segment(0, 3, SAMPLE)]).tokens.tolist() == [0]


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"temperature": 1e-8}, {2}),
        ({"temperature": 1e-38}, {2}),
        ({"temperature": 1e-300}, {2}),
        ({"temperature": 1e300, "logit_bias": {"1": -50.0}}, {0, 1, 2, 3}),
        ({"temperature": 1e300, "top_k": 2}, {1, 2}),
        ({"frequency_penalty": 1e300, "min_p": 1.0}, {0, 1, 2, 3}),
        ({"top_p": 1e-9}, {2}),
        ({"min_p": 1.0}, {2}),
        ({"top_k": 5000, "temperature": 1e30}, {0, 1, 2, 3}),
        ({"top_k": 2, "temperature": 1e30}, {1, 2}),
    ],
)
def test_extreme_parameters(params: dict[str, object], expected: set[int]) -> None:
    logits = torch.tensor([[0.5, 1.0, 1.5, -1.0]])
    sampler = sampler_of(4, {"seed": 4, **params})
    found = {step(sampler, logits, [segment(0, p, SAMPLE)]).tokens.item() for p in range(3, 80)}
    assert found == expected


def test_largest_biases_decide() -> None:
    sampler = sampler_of(50, {"logit_bias": {"0": -100.0, "49": 100.0}})
    logits = torch.zeros(1, 50)
    logits[0, 0] = 90
    assert step(sampler, logits, [segment(0, 3, SAMPLE)]).tokens.tolist() == [49]


@pytest.mark.parametrize("number", [1, 2, 7])
def test_log_probabilities_have_the_bits_of_the_training_loss(number: int) -> None:
    logits = torch.randn(7, 5003, generator=torch.Generator().manual_seed(0)) * 3
    targets = torch.arange(7) * 700
    loss = vocab_parallel_cross_entropy(logits, targets, tp_group=one_rank())
    sampler = sampler_of(5003, {"return_prompt_log_probs": True})
    result = step(sampler, logits[:number], [segment(0, 30, *targets[:number].tolist())])
    assert torch.equal(torch.from_numpy(result.log_probs), -loss[:number])


def test_tokens_and_log_probabilities_of_a_row_do_not_depend_on_other_rows() -> None:
    logits = torch.randn(9, 2003, generator=torch.Generator().manual_seed(3))
    sampler = sampler_of(2003, *[{"seed": n, "top_n_logprobs": n} for n in range(9)])
    together = step(sampler, logits, [segment(slot, 3, SAMPLE) for slot in range(9)])
    for slot in range(9):
        alone = step(sampler, logits[slot : slot + 1], [segment(slot, 3, SAMPLE)])
        assert alone.tokens[0] == together.tokens[slot]
        assert alone.log_probs[0] == together.log_probs[slot]
        assert alone.top_tokens[0].tolist() == together.top_tokens[slot, :slot].tolist()
        assert alone.top_log_probs[0].tolist() == together.top_log_probs[slot, :slot].tolist()


def test_two_threads_add_one_row_as_they_add_several() -> None:
    logits = torch.randn(20, 131072, generator=torch.Generator().manual_seed(3))
    logits[:, 0] = 12  # a small logarithm of the sum does not round its last bits away
    targets = torch.zeros(20, 1, dtype=torch.int64)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        together = log_probs_of(logits, targets)
        alone = [log_probs_of(logits[n : n + 1], targets[n : n + 1]) for n in range(20)]
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(torch.cat(alone), together)


def test_columns_that_no_block_fills_are_searched() -> None:
    """33 columns are a block of 32 and one more."""
    sampler = sampler_of(33, {"temperature": 0.0, "top_n_logprobs": 33}, {"top_k": 2, "seed": 1})
    for best in (0, 31, 32):
        logits = torch.zeros(2, 33)
        logits[:, best] = 50
        result = step(sampler, logits, [segment(0, 3, SAMPLE), segment(1, 3, SAMPLE)])
        assert result.tokens.tolist() == [best, best]
        rest = [token for token in range(33) if token != best]
        assert result.top_tokens[0].tolist() == [best, *rest]


def test_penalties_refuse_drafted_rows() -> None:
    sampler = sampler_of(5, {"presence_penalty": 1.0}, history=(1, 2, 3))
    with pytest.raises(AssertionError, match="penalties with drafted rows"):
        step(sampler, torch.zeros(2, 5), [segment(0, 4, SAMPLE, SAMPLE)])


def test_end_of_document_is_not_hidden_if_it_does_not_end_the_text() -> None:
    sampler = sampler_of(4, {"temperature": 0.0, "min_tokens": 9, "ignore_eos": True})
    logits = torch.tensor([[5.0, 1.0, 4.0, 3.0]])
    assert step(sampler, logits, [segment(0, 3, SAMPLE)]).tokens.tolist() == [EOD]


def plainly_sampled(logits: Tensor, params: dict[str, Any], position: int) -> int:
    """Return the token of one row [v] by sorting and by the noise of the whole vocabulary."""
    logits = logits.clone()
    for token, bias in params.get("logit_bias", {}).items():
        logits[int(token)] += bias
    if params["temperature"] == 0:
        return int(logits.argmax())
    scaled = (logits - logits.max()) / params["temperature"]
    kept = scaled.sort(descending=True).values[: params["top_k"] or None]
    weights = kept.double().exp()
    before = weights.cumsum(-1) - weights
    kept = kept[before < params["top_p"] * weights.sum()] if params["top_p"] else kept
    kept = kept[kept >= math.log(params["min_p"])] if params["min_p"] else kept
    scaled[scaled < kept[-1]] = float("-inf")
    keys = torch.from_numpy(row_keys([params["seed"]], np.array([position]))).int()
    blocks = torch.arange(-(-len(logits) // 32), dtype=torch.int32)[None]
    noise = exponentials(keys, blocks).flatten()[: len(logits)].log()
    return int((scaled - noise).argmax())


@pytest.mark.parametrize("vocab", [70, 3001])
def test_a_mixed_batch_gets_the_tokens_of_the_plain_definition(vocab: int) -> None:
    """3,001 tokens are 94 blocks: few of them are searched."""
    choose = random.Random(vocab)
    requests: list[dict[str, Any]] = [
        {
            "seed": choose.randrange(2**63),
            "temperature": choose.choice([0.0, 0.2, 0.7, 1.0, 1.0, 3.0]),
            "top_k": choose.choice([0, 0, 0, 1, 5, 40, 2000]),
            "top_p": choose.choice([0.0, 0.0, 0.01, 0.6, 0.95, 1.0]),
            "min_p": choose.choice([0.0, 0.0, 0.001, 0.2]),
            "logit_bias": choose.choice([{}, {}, {"3": 4.0, "69": -3.0}]),
        }
        for _ in range(400)
    ]
    sampler = sampler_of(vocab, *requests)
    logits = torch.randn(400, vocab, generator=torch.Generator().manual_seed(vocab))
    logits *= torch.tensor([0.3, 1.0, 2.0, 6.0]).repeat(100)[:, None]
    for position in (3, 77):
        result = step(sampler, logits, [segment(slot, position, SAMPLE) for slot in range(400)])
        expected = [plainly_sampled(*row, position) for row in zip(logits, requests, strict=True)]
        assert result.tokens.tolist() == expected

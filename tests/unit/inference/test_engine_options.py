"""Sizes of the engine: flags out of range are refused, huge ones cost no more than is used."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from megatron.core.config.errors import ConfigError
from megatron.core.inference.paged_engine.options import EngineOptions
from megatron.inference.engine_flags import add_engine_flags, engine_options
from megatron.training.arguments.parser import parse_args
from tests.unit.inference.test_engine import LENGTH, engine, requests

BATCHING = "--inference-dynamic-batching"
PAGE = 4 * 16 * 2 * 32 * 8  # bytes: layers, tokens, keys and values, channels, float64


def options_of(*words: str) -> EngineOptions:
    parser = argparse.ArgumentParser()
    add_engine_flags(parser)
    return engine_options(parser.parse_args(words))


@pytest.mark.parametrize(
    "word",
    [
        f"{BATCHING}-buffer-size-gb=0",
        f"{BATCHING}-buffer-size-gb=-1",
        f"{BATCHING}-buffer-overflow-factor=0.0",
        f"{BATCHING}-buffer-overflow-factor=-3.0",
        f"{BATCHING}-buffer-guaranteed-fraction=-0.5",
        f"{BATCHING}-buffer-guaranteed-fraction=1.5",
        f"{BATCHING}-buffer-guaranteed-fraction=nan",
        f"{BATCHING}-chunk-size=0",
        f"{BATCHING}-max-requests-override=0",
        f"{BATCHING}-max-tokens-override=0",
        "--inference-max-requests=0",
        "--inference-max-seq-length=0",
        "--inference-max-waiting-requests=0",
        "--inference-num-draft-tokens=-1",
    ],
)
def test_a_size_out_of_range_is_refused_with_its_flag_and_value(word: str) -> None:
    flag, value = word.split("=")
    with pytest.raises(ConfigError) as error:
        options_of(word)
    (problem,) = str(error.value).splitlines()[1:]
    assert flag in problem
    assert f" {value}: give " in problem


def test_all_sizes_out_of_range_are_reported_together() -> None:
    with pytest.raises(ConfigError) as error:
        options_of("--inference-max-requests=0", "--inference-num-draft-tokens=-1")
    assert len(str(error.value).splitlines()) == 3


@pytest.mark.parametrize(
    "options",
    [
        {"page_size": 10**12},
        {"max_requests": 10**12, "buffer_bytes": 2**22},
        {"num_draft_tokens": 10**9, "max_step_tokens": 10**12},
        {"max_sequence_length": 10**12},
    ],
)
def test_a_huge_size_costs_no_more_than_requests_can_use(options: dict[str, Any]) -> None:
    expected = engine(EngineOptions(), 1, {}).generate(requests())
    made = engine(EngineOptions(**options), 1, {})
    found = made.generate(requests())
    assert {k: [t.token for t in v] for k, v in found.items()} == {
        k: [t.token for t in v] for k, v in expected.items()
    }
    stats = made.stats()
    assert stats.num_free_pages == stats.num_pages


def test_a_buffer_of_any_size_is_a_maximum() -> None:
    assert options_of(f"{BATCHING}-buffer-size-gb", "1e300").buffer_bytes > 2**60


def test_the_longest_request_is_the_models_unless_a_flag_says_otherwise() -> None:
    assert options_of().max_sequence_length is None
    assert engine_options(parse_args(argv=[])).max_sequence_length is None
    for words in (["--inference-max-seq-length", "2560"],):
        assert options_of(*words).max_sequence_length == 2560  # also Megatron-LM's default
        assert engine_options(parse_args(argv=words)).max_sequence_length == 2560


@pytest.mark.parametrize(("asked", "longest"), [(None, 16), (LENGTH, LENGTH)])
def test_a_small_cache_lowers_the_length_of_the_model(asked: int | None, longest: int) -> None:
    made = engine(EngineOptions(buffer_bytes=PAGE, max_sequence_length=asked), 1, {})
    assert made.limits.num_pages == 1
    assert made.limits.max_sequence_length == longest
    assert made.describe().endswith(f"of up to {longest} tokens each")


def test_a_cache_takes_no_more_than_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.core.device.free_memory", lambda ranks_here: 4 * PAGE)
    assert engine(EngineOptions(max_requests=8), 1, {}).limits.num_pages == 3

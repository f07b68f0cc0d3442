"""How a run computes its initial weights."""

from __future__ import annotations

import contextlib
import io
from collections import Counter
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest

import pretrain_gpt
from megatron.core.params import param_init
from megatron.training.initialize import configure, start
from megatron.training.runtime.setup import build_model_chunks
from tests.support.ranks import run_ranks
from tests.support.runs import TINY


def fills(rank: int, world_size: int, argv: Sequence[str]) -> Counter[str]:
    """How often this rank has computed the values of each parameter."""
    counts: Counter[str] = Counter()
    fill = param_init.fill_parameter

    def counting(param: Any, info: Any, seed: int) -> None:
        counts[f"{info.name} with seed {seed}"] += 1
        fill(param, info, seed)

    with (
        contextlib.redirect_stdout(io.StringIO()),
        mock.patch.object(param_init, "fill_parameter", counting),
    ):
        run = start(configure(argv=argv))
        build_model_chunks(run, pretrain_gpt.model_provider)
    return counts


@pytest.mark.feature("Layouts: each rank computes its initial weights once")
@pytest.mark.parametrize(
    "flags", ["--pipeline-model-parallel-size 2 --bf16", "--data-parallel-random-init"]
)
def test_a_rank_computes_its_initial_weights_once(flags: str) -> None:
    for counts in run_ranks(fills, 2, [*TINY, "--seed", "7", *flags.split()]):
        assert len(counts) > 10
        assert set(counts.values()) == {1}
        assert all(name.endswith("with seed 7") for name in counts)

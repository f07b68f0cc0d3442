"""Adaptive recomputation: its search as arithmetic, its meter, and a run under a tight budget."""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron.core import device
from megatron.training.callbacks.adaptive_recompute import PARTS, SavedBytes, Search, apply
from tests.support.ranks import run_ranks
from tests.support.runs import TINY, losses, run_gpt, train_gpt

GAINS = {"layer": 1.0, "mlp": 4.0, "core_attn": 3.0, "layernorm": 2.0}  # bytes of a layer


def settle(limit: float, num_layers: int, gains: dict[str, float]) -> tuple[Search, float, int]:
    """Let a search see the peaks of a model whose layers are as large as ``gains`` says."""
    search, steps = Search(num_layers, limit), 0
    while True:
        peak = 10.0 + sum(gains[part] * count for part, count in search.kept.items())
        if search.is_settled:
            return search, peak, steps
        search.observe(peak)
        steps += 1
        assert steps < 40, search


@pytest.mark.parametrize("limit", [5.0, 10.5, 11.0, 13.7, 18.0, 29.0, 1000.0])
def test_the_search_ends_full_and_within_the_budget(limit: float) -> None:
    search, peak, steps = settle(limit, 8, GAINS)
    if limit < 10:
        assert not any(search.kept.values())
        return
    assert peak <= limit
    assert steps <= 18
    # Nothing that could still be kept would fit.
    if search.kept["layer"] < 8:
        assert peak + GAINS["layer"] > limit
    for part in PARTS[1:]:
        if search.kept[part] < search.kept["layer"]:
            assert peak + GAINS[part] > limit, part


def test_layers_that_turn_out_larger_are_taken_back() -> None:
    search = Search(4, 10.0)
    search.observe(5.0)
    assert search.kept["layer"] == 1
    search.observe(6.0)
    assert search.kept["layer"] == 2, "twice as many, not all three that fit by the growth of one"
    search.observe(8.0)
    assert search.kept["layer"] == 3, "the second took 2.0, so one more fits"
    search.observe(10.5)
    assert search.kept["layer"] == 2
    search.observe(8.0)
    assert search.kept == {"layer": 2, "mlp": 1, "core_attn": 0, "layernorm": 0}
    while not search.is_settled:
        search.observe(9.9)
    kept = dict(search.kept)
    assert not search.observe(9.9)
    assert search.observe(10.1), "a later peak above the budget takes one more back"
    assert sum(kept.values()) == sum(search.kept.values()) + 1


def test_a_part_that_takes_no_memory_is_kept_everywhere() -> None:
    search, _, _ = settle(50.0, 4, {**GAINS, "layernorm": 0.0})
    assert search.kept["layernorm"] == search.kept["layer"] == 4


def test_the_last_layers_of_all_blocks_keep_first() -> None:
    def layer() -> SimpleNamespace:
        attention = SimpleNamespace(recomputes_core=None)
        return SimpleNamespace(self_attention=attention, may_recompute_norms=True)

    blocks = [SimpleNamespace(layers=[layer() for _ in range(3)]) for _ in range(2)]
    apply(blocks, {"layer": 4, "mlp": 2, "core_attn": 1, "layernorm": 0})
    assert [block.recomputed_layers for block in blocks] == [2, 0]
    layers = blocks[0].layers + blocks[1].layers
    assert [x.recomputes_mlp for x in layers] == [False, False, True, True, False, False]
    cores = [x.self_attention.recomputes_core for x in layers]
    assert cores == [False, False, True, True, True, False]
    assert [x.recomputes_norms for x in layers] == [False, False, True, True, True, True]


def test_the_meter_counts_storages_once_and_forgets_what_backward_frees() -> None:
    meter, x = SavedBytes(), torch.ones(100, requires_grad=True)
    meter.start()
    y = (x * 2).exp()  # keeps its output
    z = (y * y).sum()  # the same storage twice
    assert meter.alive == 400
    z.backward()
    assert meter.alive == 0
    assert meter.stop() == 400
    meter.start()
    assert meter.stop() == 0


@pytest.mark.feature("Memory: adaptive recomputation keeps as much as the memory budget allows")
@pytest.mark.parametrize("pp", [1, 2])
def test_a_run_keeps_what_fits_with_the_same_losses(tmp_path: Path, pp: int) -> None:
    flags = "--num-layers 4 --train-iters 12 --hidden-dropout 0.1 --attention-dropout 0.1".split()
    flags += ["--pipeline-model-parallel-size", str(pp)]
    kind = "--recompute-granularity adaptive --memory-budget-fraction".split()
    some_fit = 400_000 if pp == 1 else 500_000  # bytes
    budget = some_fit / device.total_memory(ranks_here=pp)
    plain = losses(run_gpt(tmp_path / "plain", *flags, world_size=pp))
    argv = [*TINY, "--metrics-file", str(tmp_path / "m"), *flags, *kind, f"{budget:.6e}"]
    said = run_ranks(train_and_tell, pp, argv)[0]
    found = [json.loads(line) for line in (tmp_path / "m").read_text().splitlines()]
    assert losses(found) == plain
    (settled,) = re.findall(r"\(settled\): .* so many keep: layer (\d), mlp (\d)", said)
    assert 0 < int(settled[0]) <= 4 // pp
    assert int(settled[1]) < 4 // pp, "the budget is too small for everything"


def train_and_tell(rank: int, world_size: int, argv: list[str]) -> str:
    """What the run printed."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        train_gpt(rank, world_size, argv)
    return said.getvalue()

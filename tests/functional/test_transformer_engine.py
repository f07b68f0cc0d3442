"""The command line with Transformer Engine in a stand-in: the runs of our own layers."""

from __future__ import annotations

import contextlib
import io
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import selection, tolerances
from tests.support.fake_transformer_engine import installed
from tests.support.ranks import run_ranks
from tests.support.runs import SIX_STEPS, losses, run_gpt, train_gpt

NOTED = ("kind", "recipe", "is_first", "splits", "fuses")
KEYS = ("lm loss", "grad-norm", "params-norm")
BASE = [*SIX_STEPS, "--log-params-norm"]
LAYOUT = (
    "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 "
    "--use-distributed-optimizer --recompute-granularity full --recompute-method uniform "
    "--recompute-num-layers 1 --micro-batch-size 1"
).split()
EXPERTS = (
    "--num-experts 4 --swiglu --moe-grouped-gemm --moe-router-topk 2 --disable-bias-linear "
    "--moe-token-dispatcher-type alltoall --moe-layer-freq [0,1] --normalization RMSNorm"
).split()


def train_with_engine(rank: int, world_size: int, argv: Sequence[str]) -> list[dict[str, Any]]:
    """The calls of the package's modules in a run."""
    with installed() as calls, contextlib.redirect_stdout(io.StringIO()) as said:
        train_gpt(rank, world_size, argv)
    if rank == 0:
        assert "attention: Transformer Engine; PyTorch computes" in said.getvalue()
        is_quantized = "--fp8-recipe" in argv
        assert ("yes, through Transformer" in said.getvalue()) is is_quantized
    return [{k: call.get(k) for k in NOTED} for call in calls]


def run_with_engine(
    folder: Path, *flags: str, world_size: int = 1, base: Sequence[str] = BASE
) -> tuple[list[dict[str, Any]], list[list[dict[str, Any]]]]:
    """The metrics of a run, and the calls on each rank."""
    folder.mkdir(parents=True, exist_ok=True)
    metrics = folder / "metrics.jsonl"
    argv = [*base, "--metrics-file", str(metrics), *flags]
    calls = run_ranks(train_with_engine, world_size, argv)
    return [json.loads(line) for line in metrics.read_text().splitlines()], calls


def assert_same(found: Any, expected: Any) -> None:
    for key in KEYS:
        assert losses(expected, key)
        torch.testing.assert_close(
            torch.tensor(losses(found, key)),
            torch.tensor(losses(expected, key)),
            **tolerances.LAYOUT_LOSS,
        )


@pytest.mark.feature("Speed: layers of Transformer Engine where it is installed")
@pytest.mark.parametrize(
    ("flags", "world_size"),
    [
        (["--group-query-attention", "--num-query-groups", "2", "--window-size", "8,0"], 1),
        (LAYOUT, 4),
        ([*LAYOUT, "--no-gradient-accumulation-fusion"], 4),
    ],
    ids=["alone", "layout", "unfused"],
)
def test_a_run_is_that_of_our_own_layers(tmp_path, flags, world_size):
    of_model = [] if flags[0].startswith("--tensor") else flags
    expected = run_gpt(tmp_path / "local", "--transformer-impl", "local", *of_model, base=BASE)
    found, calls = run_with_engine(tmp_path / "engine", *flags, world_size=world_size)
    assert_same(found, expected)
    kinds = Counter(call["kind"] for call in calls[0])
    fuses = {call["fuses"] for call in calls[0] if call["kind"] == "Linear"}
    assert fuses == {world_size > 1 and "--no-gradient-accumulation-fusion" not in flags}
    assert kinds["LayerNormLinear"] == kinds["Linear"] == 2 * kinds["DotProductAttention"] > 0


def test_experts_of_a_rank_are_one_product(tmp_path):
    base = [*BASE, *EXPERTS]
    expected = run_gpt(tmp_path / "local", "--transformer-impl", "local", base=base)
    flags = ["--expert-model-parallel-size", "2", "--micro-batch-size", "1"]
    found, calls = run_with_engine(tmp_path / "engine", *flags, base=base, world_size=2)
    assert_same(found, expected)
    assert Counter(call["kind"] for call in calls[0])["GroupedLinear"] > 0


def test_a_checkpoint_moves_between_implementations_and_layouts(tmp_path):
    local = ["--transformer-impl", "local"]
    expected = run_gpt(tmp_path / "whole", *local, base=BASE)
    first = ["--save-interval", "3", "--exit-interval", "3", "--save"]
    engines, ours = str(tmp_path / "engines"), str(tmp_path / "ours")
    run_with_engine(tmp_path / "a", *LAYOUT, *first, engines, world_size=4)
    run_gpt(tmp_path / "b", *local, *first, ours, base=BASE)
    by_ours = run_gpt(tmp_path / "c", *local, "--load", engines, base=BASE)
    by_engine, _ = run_with_engine(tmp_path / "d", *LAYOUT, "--load", ours, world_size=4)
    for found in (by_ours, by_engine):
        assert len(losses(found)) == 3
        assert_same(found, expected[3:])


@pytest.mark.parametrize("layout", selection.first(1, [[], LAYOUT]), ids=["alone", "layout"])
def test_histories_of_delayed_scaling_resume(tmp_path, layout):
    flags = "--hidden-size 64 --fp8-format hybrid --fp8-recipe delayed --fp8-amax-history-len 2"
    base = [*BASE, *flags.split()]
    ranks = 4 if layout else 1
    whole = tmp_path / "whole"
    expected, (calls, *_) = run_with_engine(whole, *layout, base=base, world_size=ranks)
    recipes = {str(call["recipe"]) for call in calls if call["kind"] == "Linear"}
    assert recipes == {
        "DelayedScaling(margin=0, fp8_format='hybrid', amax_history_len=2, "
        "amax_compute_algo='most_recent')"
    }
    save = [*layout, "--save", str(tmp_path / "saved"), "--save-interval", "3"]
    run_with_engine(tmp_path / "a", *save, "--exit-interval", "3", base=base, world_size=ranks)
    load = [*layout, "--load", str(tmp_path / "saved")]
    resumed, _ = run_with_engine(tmp_path / "b", *load, base=base, world_size=ranks)
    assert_same(resumed, expected[3:])
    elsewhere = run_gpt(
        tmp_path / "c", *load[len(layout) :], "--transformer-impl", "local", base=base
    )
    assert len(losses(elsewhere)) == 3, "our own layers resume from the histories"


def test_layers_follow_their_recipe_and_the_outer_ones_none(tmp_path):
    flags = "--bf16 --num-layers 4 --fp8-format hybrid --fp8-recipe blockwise".split()
    flags += ["--first-last-layers-bf16", "--train-iters", "1", "--eval-iters", "0", *EXPERTS]
    flags += ["--moe-layer-freq", "[0,0,1,0]", "--recompute-granularity", "selective"]
    flags += ["--recompute-modules", "mlp"]  # where no layer enters the recipe
    _, (calls,) = run_with_engine(tmp_path, *flags)
    blockwise, batches = "Float8BlockScaling(fp8_format='hybrid')", 4
    # Calls of a micro-batch: one dense layer of four is an inner one, and its MLP computed twice.
    per_batch = {
        ("LayerNormLinear", None): 2 * (1 + 2),  # queries, keys, values; the MLP
        ("Linear", None): 2 * (1 + 2),
        ("LayerNormLinear", blockwise): 1 + 2 + 1,
        ("Linear", blockwise): 1 + 2 + 1,
        ("GroupedLinear", blockwise): 2,
    }
    matrices = {kind for kind, _ in per_batch}
    names = [(c["kind"], c["recipe"] and str(c["recipe"])) for c in calls if c["kind"] in matrices]
    assert Counter(names) == {name: batches * n for name, n in per_batch.items()}
    splits = {n for call in calls for n in call["splits"] or ()}
    assert splits
    assert not any(n % 16 for n in splits)  # rows of an expert, filled up for the kernels
    # Weights are quantized anew where the first micro-batch meets them.
    anew = [call["kind"] for call in calls if call["is_first"]]
    assert Counter(anew) == {"LayerNormLinear": 3, "Linear": 3, "GroupedLinear": 2}

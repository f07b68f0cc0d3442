"""Layers that repeat are traced a few times; the plan equals that of tracing each of them."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.training.planning import repeats
from megatron.training.planning.repeats import traced_spans
from megatron.training.planning.run_plan import plan_run
from tests.support.command_lines import run_of

EXPERTS = "--num-experts 4 --disable-bias-linear --swiglu --moe-ffn-hidden-size 96 "
CASES = {
    "dense, bf16": (1, "--bf16 --swiglu"),
    "windows in turn": (1, "--window-size 8,0 --window-attn-skip-freq 2"),
    "recompute of chunks": (
        1,
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
    ),
    "recompute of some layers": (
        1,
        "--recompute-granularity full --recompute-method block --recompute-num-layers 5",
    ),
    "experts after dense layers": (
        2,
        f"{EXPERTS} --moe-layer-freq [0]*3+[1]*9 --expert-model-parallel-size 2 --bf16 "
        "--moe-aux-loss-coeff 0.01 --moe-router-score-function sigmoid "
        "--moe-router-enable-expert-bias --use-distributed-optimizer",
    ),
    "virtual stages": (
        2,
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
    ),
    "hybrid": (
        2,
        "--model-kind mamba --hybrid-override-pattern MM*-MM*-MM*- --mamba-head-dim 16 "
        "--mamba-num-groups 2 --mamba-state-dim 16 --position-embedding-type none "
        "--tensor-model-parallel-size 2 --sequence-parallel",
    ),
    "T5": (1, "--model-kind t5 --decoder-num-layers 12 --decoder-seq-length 32"),
}


@pytest.fixture(autouse=True)
def _no_collection_of_garbage() -> Iterator[None]:
    """Garbage that waits for its collection is memory, and when that happens is arbitrary."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.feature("Planner: seconds for models of any depth, the bytes of tracing each layer")
@pytest.mark.parametrize("case", CASES)
def test_the_plan_is_that_of_tracing_every_layer(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world_size, words = CASES[case]
    config = run_of(f"--num-layers 12 {words}", world_size)
    plan_run(config)  # the first plan of a process counts what its caches keep from then on
    with_repeats = plan_run(config)
    skipped: list[int] = []

    def every_one(kinds: Sequence[Any]) -> list[int]:
        skipped.append(len(kinds) - len(traced_spans(kinds)))
        return list(range(len(kinds)))

    monkeypatch.setattr(repeats, "traced_spans", every_one)
    for stage, expected in zip(with_repeats.stages, plan_run(config).stages, strict=True):
        assert (stage.cost, stage.activations) == (expected.cost, expected.activations)
    assert sum(skipped) > 0 or case == "virtual stages", "else the test compares nothing"


def test_a_deep_model_runs_no_more_layers_than_a_shallow_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs: list[int] = []
    forward = TransformerLayer.forward

    def counted(layer: TransformerLayer, *args: Any, **kwargs: Any) -> Any:
        runs.append(layer.layer_number)
        return forward(layer, *args, **kwargs)

    monkeypatch.setattr(TransformerLayer, "forward", counted)
    plan_run(run_of("--num-layers 100"))
    assert len(runs) == 2 * len(set(runs)), "two micro-batches"
    assert set(runs) == {1, 99, 100}


def test_a_layer_whose_class_is_not_ours_may_depend_on_its_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The plan cannot know what such a class does, so it traces each of its layers."""
    seen: list[int] = []
    forward = MLP.forward

    def numbered(mlp: MLP, *args: Any, **kwargs: Any) -> Any:
        seen.append(1)
        return forward(mlp, *args, **kwargs)

    monkeypatch.setattr(MLP, "forward", numbered)
    monkeypatch.setattr(TransformerLayer, "__module__", "somebody.layers")
    plan_run(run_of("--num-layers 12"))
    assert len(seen) == 2 * 12


@pytest.mark.parametrize(
    ("kinds", "traced"),
    [
        ("A", [0]),
        ("AA", [0, 1]),
        ("AAAAAAAA", [0, 6, 7]),
        ("DDDEEEEEEEE", [0, 1, 2, 3, 9, 10]),
        ("ABABABABAB", [0, 7, 8, 9]),
    ],
)
def test_each_skipped_span_has_a_traced_one_between_equal_neighbours(
    kinds: str, traced: list[int]
) -> None:
    assert traced_spans(kinds) == traced

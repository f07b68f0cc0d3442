"""Every layout computes what one process computes: random ones, and all that were ever wrong."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.support import tolerances
from tests.support.draws import draw
from tests.support.layouts import Trace, badly_rounded, compare, must_agree
from tools.dev import matrix
from tools.dev.lib.layout_axes import Sizes, case_of

# What the fuzzer, or somebody's fuzzer of such systems, has found wrong once.
FOUND = {
    "mlp-recomputed-with-its-bias-added-later": ("tp recompute-selective", Sizes()),
    "vocabulary-that-tp-does-not-divide": ("tp dp", Sizes(tp=4)),
    "micro-batch-size-with-padded-samples": (
        "dp padded eod-mask per-token-loss", Sizes(micro=1, microbatches=4),
    ),
    "replicas-with-other-numbers-of-tokens": ("dp padded", Sizes(dp=4)),
    "clipping-over-tensor-ranks": ("tp sp dp clip gqa rms-norm", Sizes()),
    "pipelines-before-replicas-with-context-ranks": ("pp cp-p2p dp tp-pp-dp", Sizes()),
    "experts-of-one-replica-fully-sharded": ("fsdp2 ep", Sizes()),
    "list-that-names-no-layer-of-experts": ("dp dense-first-layer z-loss", Sizes(depth=1)),
    "stages-that-do-not-divide-the-layers": ("pp auto-split", Sizes(pp=3, depth=1)),
    "tied-copies-of-a-sharded-optimizer": ("pp dp zero-1 tied clip", Sizes(microbatches=3)),
    "codes-of-gradients-of-three-replicas": ("dp fp8-tensorwise", Sizes(dp=3)),
    "codes-of-undivided-gradients": ("dp fp8-tensorwise per-token-loss", Sizes(dp=3)),
}  # fmt: skip

SEEDS = 20
ALWAYS = (1, 8)  # random layouts of each test run: few ranks; `make test-all` compares all

# What users of such systems ask for (section C of what was gathered), and what shows each besides
# all random layouts.  C3, auxiliary losses, comes with experts.
DEMANDS = {
    "C1: every layout computes the answer of one process": (
        "vocabulary-that-tp-does-not-divide", "replicas-with-other-numbers-of-tokens",
        "pipelines-before-replicas-with-context-ranks",
    ),
    "C2: gradient norm and clipping do not depend on the layout": ("clipping-over-tensor-ranks",),
    "C5: the micro-batch size does not change the result": (
        "micro-batch-size-with-padded-samples",
    ),
    "C6: tied embeddings stay tied": ("tied-copies-of-a-sharded-optimizer",),
    "C8: what combines with what is said": (
        "test_no_pair_of_features_is_accepted_and_untested",
    ),
    "C9: any layer count on any stage count": ("stages-that-do-not-divide-the-layers",),
}  # fmt: skip


@pytest.mark.feature("Layouts: a fuzzer compares random layouts and models with one process")
@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(seed, marks=pytest.mark.slow if seed not in ALWAYS else ())
        for seed in range(SEEDS)
    ],
)
def test_a_random_layout_gives_the_answer_of_one_process(seed: int) -> None:
    drawn = draw(seed)
    print(drawn)  # pytest shows it when the test fails
    must_agree(drawn.case)


@pytest.mark.parametrize("name", FOUND)
def test_what_was_wrong_once_is_right(name: str) -> None:
    features, sizes = FOUND[name]
    must_agree(case_of(features.split(), sizes))


@pytest.mark.feature("Layouts: every pair of features is tested or refused (docs/matrix.md)")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in matrix.slow_cases() else ())
        for name in matrix.cases()
    ],
)
def test_features_combine(name: str) -> None:
    must_agree(matrix.cases()[name])


def test_no_pair_of_features_is_accepted_and_untested() -> None:
    assert matrix.untested() == [], "cover them: python tools/dev/matrix.py --cover"


def test_each_demand_has_its_case() -> None:
    shown = {name for names in DEMANDS.values() for name in names}
    assert shown <= {*FOUND, *globals()}


def trace_of(losses: list[float]) -> Trace:
    weight = [("w", torch.tensor([[1.0, 2.0], [3.0, 4.0]]))]
    ones, named = [1.0, 1.0, 1.0], {"lm loss": losses} if losses else {}
    return Trace(named, ones[:], ones[:], [0, 0, 0], weight, copy.deepcopy(weight))


def test_the_comparison_sees_each_kind_of_difference() -> None:
    alone, allowed = trace_of([3.0, 2.0, 1.0]), tolerances.LAYOUT[torch.float32]
    elsewhere = trace_of([])  # a stage without the loss
    assert compare([copy.deepcopy(alone), elsewhere], alone, allowed) == []
    other = copy.deepcopy(alone)
    other.losses["lm loss"][1] *= 1 + 1e-5
    other.norms[2] += 1e-5
    other.params_norms[0] += 1e-5
    other.zeros[0] += 1
    other.zeros[2] += 1
    other.gradients[0][1][1, 0] += 1e-3
    other.weights[0][1][0, 1] += 1e-5
    found = compare([alone, other], alone, allowed)
    assert [sentence.split(":")[0] for sentence in found] == [
        "lm loss of step 2 on rank 1", "norm of step 3 on rank 1",
        "params norm of step 1 on rank 1",
        "zeros of step 1 on rank 1", "zeros of step 1 on rank 1", "zeros of step 3 on rank 1",
        "gradient of w", "weight w", "copies of w differ",
    ]  # fmt: skip
    half = copy.deepcopy(alone)
    half.gradients[0][1][1] = torch.nan
    half.weights[0][1][0] = torch.nan
    with pytest.raises(AssertionError, match=r"no rank holds all of \['w'\]"):
        compare([half], alone, allowed)
    with pytest.raises(AssertionError, match="no rank reported .'lm loss'"):
        compare([elsewhere], alone, allowed)


def test_a_gradient_in_16_bits_may_be_off_as_far_as_rounding_explains() -> None:
    names = ["layers.0.w", "layers.1.w", "layers.1.mlp.experts.0.w", "layers.1.b"]
    exact = [(name, torch.ones(100)) for name in names]

    def off(*errors: float) -> list[tuple[str, torch.Tensor]]:
        pairs = zip(exact, errors, strict=True)
        return [(name, ones * (1 + error)) for (name, ones), error in pairs]

    def reported(*layout: float) -> list[str]:
        found = badly_rounded([off(*layout)], off(0.01, 0.1, 0.01, 0.01), exact, 0.06, 0.125)
        return [sentence.split(":")[0].removeprefix("gradient of ") for sentence in found]

    assert reported(0.05, 0.1, 0.05, 0.06) == []  # as one process, or within the line
    assert reported(0.19, 0.19, 0.24, 0.01) == []  # as the other layer; an expert lacks a token
    assert reported(0.21, -0.19, 0.26, 0.08) == ["layers.0.w", *names[2:]]

"""--pipeline-split auto: stages of equal cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import pytest

from megatron.core.transformer.layer_layout import layer_ranges
from megatron.training.estimates.automatic_settings import (
    balanced_sizes,
    costs,
    resolve_pipeline_split,
)
from tests.support.command_lines import run_of


def stage_costs(
    layers: Sequence[float], sizes: Sequence[int], first: float, last: float
) -> list[float]:
    sums = [0.0, *accumulate(layers)]
    ends = list(accumulate(sizes))
    found = [sums[end] - sums[end - size] for end, size in zip(ends, sizes, strict=True)]
    found[0] += first
    found[-1] += last
    return found


def all_sizes(num_layers: int, num_stages: int) -> Iterator[list[int]]:
    if num_stages == 1:
        yield [num_layers]
        return
    for size in range(num_layers + 1):
        yield from ([size, *rest] for rest in all_sizes(num_layers - size, num_stages - 1))


@pytest.mark.parametrize("last", [0.0, 0.5, 2.0, 7.0])
@pytest.mark.parametrize("layers", [[1.0] * 7, [1, 1, 2, 0.5, 1, 1, 3, 1], [1.0] * 3])
def test_no_split_is_faster(layers: list[float], last: float) -> None:
    for num_stages in range(1, 6):
        sizes = balanced_sizes(layers, num_stages, first=0.1, last=last)
        ours = stage_costs(layers, sizes, 0.1, last)
        others = [
            stage_costs(layers, other, 0.1, last)
            for other in all_sizes(len(layers), num_stages)
            if all(other[1:-1])
        ]
        assert max(ours) == pytest.approx(min(map(max, others)))
        as_fast = [other for other in others if max(other) <= max(ours) * (1 + 1e-9)]
        squares = [sum(cost * cost for cost in costs) for costs in (ours, *as_fast)]
        assert squares[0] == pytest.approx(min(squares))


@pytest.mark.feature("Pipeline parallel: an automatic, balanced split, --pipeline-split auto")
@pytest.mark.parametrize("pp", [4, 8, 16])
def test_stages_of_a_real_model_differ_by_five_percent_at_most(pp: int) -> None:
    """Llama 3 405B: its loss takes as long as a half of a layer."""
    words = (
        f"--pipeline-model-parallel-size {pp} --pipeline-split auto --num-layers 126 --swiglu "
        "--hidden-size 16384 --ffn-hidden-size 53248 --num-attention-heads 128 --seq-length 8192 "
        "--group-query-attention --num-query-groups 8 --vocab-size 128000 "
        "--max-position-embeddings 8192"
    )
    run = run_of(words, world_size=pp)
    layers, first, last = costs(run, 128256)
    settled = resolve_pipeline_split(run, 128256)
    sizes = [len(stage) for stage in layer_ranges(settled.model, pp)]
    found = stage_costs(layers, sizes, first, last)
    assert sum(sizes) == 126
    assert max(found) <= 1.05 * sum(found) / pp


def test_a_large_vocabulary_takes_layers_from_the_last_stage() -> None:
    words = "--pipeline-model-parallel-size 4 --pipeline-split auto --num-layers 16"
    model = resolve_pipeline_split(run_of(words, world_size=4), 3000).model
    sizes = [len(stage) for stage in layer_ranges(model, 4)]
    assert sizes[-1] < min(sizes[:-1])


@pytest.mark.parametrize(("more", "first"), [("", 1), ("--freeze-ViT", 3)])
def test_an_encoder_of_images_takes_the_place_of_layers(more: str, first: int) -> None:
    words = (
        "--model-kind vlm --pipeline-model-parallel-size 2 --pipeline-split auto --num-layers 8 "
        "--seq-length 16 --img-h 32 --img-w 32 --patch-dim 4 --vision-num-layers 6 "
        f"--hidden-size 256 {more}"
    )
    run = run_of(words, world_size=2)
    settled = resolve_pipeline_split(run, 128)
    assert len(layer_ranges(settled.model, 2)[0]) == first

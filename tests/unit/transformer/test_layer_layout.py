"""Which layers live on which pipeline stage."""

from __future__ import annotations

import copy
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.core.config.errors import ConfigError
from megatron.core.enums import LayerType
from megatron.core.transformer import pipeline_parallel_layer_layout
from megatron.core.transformer.layer_layout import layer_range, layer_ranges
from megatron.core.transformer.pipeline_parallel_layer_layout import (
    PipelineParallelLayerLayout,
    parse_layout,
)
from tests.support.one_process import tiny_config


def stages(num_ranks: int, **changes: Any) -> list[list[int]]:
    return [list(layers) for layers in layer_ranges(tiny_config(**changes), num_ranks)]


COUNTED = {
    "account_for_embedding_in_pipeline_split": True,
    "account_for_loss_in_pipeline_split": True,
}


def test_layers_are_dealt_out_evenly() -> None:
    assert stages(1, num_layers=3) == [[0, 1, 2]]
    assert stages(2, num_layers=4) == [[0, 1], [2, 3]]
    interleaved = stages(2, num_layers=8, virtual_pipeline_model_parallel_size=2)
    assert interleaved == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.feature("Pipeline parallel: uneven first and last stages")
def test_the_ends_may_have_other_numbers_of_layers() -> None:
    uneven = {"num_layers_in_first_pipeline_stage": 1, "num_layers_in_last_pipeline_stage": 2}
    assert stages(4, num_layers=9, **uneven) == [[0], [1, 2, 3], [4, 5, 6], [7, 8]]
    assert stages(2, num_layers=3, **uneven) == [[0], [1, 2]]
    even = {name: 2 * count for name, count in uneven.items()}
    chunks = stages(3, num_layers=12, virtual_pipeline_model_parallel_size=2, **even)
    assert chunks == [[0], [1, 2, 3], [4, 5], [6], [7, 8, 9], [10, 11]]


def test_embedding_and_loss_may_count_as_layers() -> None:
    assert stages(2, num_layers=4, **COUNTED) == [[0, 1], [2, 3]]
    assert stages(3, num_layers=7, **COUNTED) == [[0, 1], [2, 3, 4], [5, 6]]
    chunks = stages(2, num_layers=6, virtual_pipeline_model_parallel_size=2, **COUNTED)
    assert chunks == [[0], [1, 2], [3, 4], [5]]


def test_in_v_placement_the_last_rank_of_a_chunk_is_the_first_of_the_next() -> None:
    config = tiny_config(
        num_layers=8, virtual_pipeline_model_parallel_size=2, pipeline_schedule="zb-v"
    )
    chunks = [
        [list(layer_range(config, pp_rank=r, num_ranks=2, vp_stage=c)) for c in range(2)]
        for r in range(2)
    ]
    assert chunks == [[[0, 1], [6, 7]], [[2, 3], [4, 5]]]
    first_has_six = stages(
        2,
        num_layers=8,
        virtual_pipeline_model_parallel_size=2,
        pipeline_schedule="zb-v",
        num_layers_in_first_pipeline_stage=6,
    )
    assert first_has_six == [[0, 1, 2], [3], [4], [5, 6, 7]]


@pytest.mark.parametrize(
    ("text", "contents"),
    [
        ("Ett|tL", ["Ett", "tL"]),
        ("Et*3|t*2L", ["Ettt", "ttL"]),
        ("E, (t|)*3, t | L", ["Et", "t", "t", "t", "L"]),
        ("E|(t|)*2||L", ["E", "t", "t", "", "", "L"]),
        ("E((t*2|)*2t)*2L", ["Ett", "tt", "ttt", "tt", "tL"]),
        (r"Et*3\|(tt\|)*2,m\|L", ["Ettt", "tt", "tt", "m", "L"]),
        (r"""'Et\|tL'""", ["Et", "tL"]),
        (r"Et\\|\\(tt\\|\\)*2L", ["Et", "tt", "tt", "L"]),
    ],
)
def test_a_layout_is_read(text: str, contents: list[str]) -> None:
    assert parse_layout(text) == contents


def test_a_layout_that_repeats_without_bound_is_refused() -> None:
    with pytest.raises(ConfigError, match="more than 65536 letters"):
        parse_layout("E((((t*9999)*9999)*9999)*9999)L")


@pytest.mark.feature("Pipeline parallel: a layout of one's own, --pipeline-model-parallel-layout")
def test_a_layout_deals_out_layers_through_the_ranks_chunk_after_chunk() -> None:
    text = "Et|tt||t*2L"
    config = tiny_config(
        num_layers=5, pipeline_model_parallel_layout=text, virtual_pipeline_model_parallel_size=2
    )
    of_rank_1 = [layer_range(config, pp_rank=1, num_ranks=2, vp_stage=c) for c in range(2)]
    assert of_rank_1 == [range(1, 3), range(3, 5)]
    assert [list(s) for s in layer_ranges(config, 2)] == [[0], [1, 2], [], [3, 4]]


def test_every_layer_lives_on_one_stage_whatever_is_asked() -> None:
    tried = 0
    for num_ranks in range(1, 6):
        for num_layers in range(1, 14):
            for chunks in (None, 2, 3):
                for first in (None, 1, 2):
                    for last in (None, 1, 3):
                        try:
                            layers = stages(
                                num_ranks,
                                num_layers=num_layers,
                                virtual_pipeline_model_parallel_size=chunks,
                                num_layers_in_first_pipeline_stage=first,
                                num_layers_in_last_pipeline_stage=last,
                            )
                        except ConfigError:
                            continue
                        tried += 1
                        assert list(chain.from_iterable(layers)) == list(range(num_layers))
    assert tried > 100


def test_layers_that_cannot_be_dealt_out_are_an_error() -> None:
    with pytest.raises(ConfigError, match="5 cannot be split evenly over 2 pipeline ranks"):
        stages(2, num_layers=5)
    with pytest.raises(ConfigError, match="3 layers of a pipeline rank .* 2 virtual stages"):
        stages(2, num_layers=6, virtual_pipeline_model_parallel_size=2)


def test_a_layout_is_a_text_or_a_list_and_answers_for_this_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    groups = SimpleNamespace(pp=SimpleNamespace(rank=lambda: 1))
    monkeypatch.setattr(pipeline_parallel_layer_layout, "default_groups", lambda: groups)
    stages = [["embedding", "decoder"], [LayerType.decoder] * 2, [], ["decoder", "mtp", "loss"]]
    layout = PipelineParallelLayerLayout(stages, 2)
    assert layout == "Et|tt||tmL"
    assert copy.deepcopy(layout).layout == [[layout.stages[0], []], layout.stages[1::2]]
    assert layout.virtual_pipeline_model_parallel_size == 2
    assert (layout.get_layer_offset(), layout.get_layer_offset(vp_stage=1)) == (1, 3)
    assert layout.get_layer_id_list(vp_stage=0) == [1, 2]
    assert layout.get_num_layers_to_build(LayerType.mtp, vp_stage=1) == 1
    assert PipelineParallelLayerLayout.get_num_stages_from_str("Et*3|tL") == 2
    with pytest.raises(ValueError, match="unknown: use embedding, decoder, mtp, loss"):
        PipelineParallelLayerLayout([["unknown"]], 1)

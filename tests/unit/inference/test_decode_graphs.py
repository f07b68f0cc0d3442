"""CUDA graphs of decode steps, on the CPU's stand-in for them: the tokens of steps without."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.core.inference.paged_engine import decode_graphs
from megatron.core.inference.paged_engine.decode_graphs import DecodeGraphs, captured_sizes
from megatron.core.inference.paged_engine.engine import EngineOptions
from tests.support import selection
from tests.support.graph_stand_in import graphs_on_cpu
from tests.unit.inference.test_engine import MOE, Tokens, assert_equal, engine, requests

MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "groups, window and sink": {
        "num_query_groups": 2,
        "window_size": (7, 0),
        "softmax_type": "learnable",
    },
    "softcap": {"attn_logit_softcapping": 3.0},
}


def made(num_graphs: int = 3, **changes: Any) -> Any:
    options = EngineOptions(
        page_size=4, max_requests=6, num_cuda_graphs=num_graphs, has_prefix_cache=False
    )
    return engine(options, 1, {}, **changes)


def tokens_of(one: Any) -> Tokens:
    found = one.generate(requests())
    return {k: [(t.token, t.log_prob) for t in tokens] for k, tokens in found.items()}


def test_sizes_are_evenly_spaced_up_to_all_requests() -> None:
    assert captured_sizes(3, 6) == [2, 4, 6]
    assert captured_sizes(16, 256) == list(range(16, 257, 16))
    assert captured_sizes(4, 10) == [3, 5, 8, 10]
    assert captured_sizes(16, 3) == captured_sizes(-1, 3) == [1, 2, 3]
    assert captured_sizes(0, 3) == []


@pytest.mark.feature("Generation: decode steps are CUDA graphs per batch size, with equal tokens")
@pytest.mark.parametrize(
    ("name", "num_graphs"),
    selection.only(
        [("plain", -1), ("groups, window and sink", 3)],
        [("plain", 1), ("plain", -1), *((name, 3) for name in MODELS)],
    ),
)
def test_graphs_give_the_tokens_of_steps_without(name: str, num_graphs: int) -> None:
    wanted = tokens_of(made(0, **MODELS[name]))
    with graphs_on_cpu() as graph:
        one = made(num_graphs, **MODELS[name])
        for _ in range(2):
            assert_equal(tokens_of(one), wanted)
        assert 0 < graph.graphs <= len(captured_sizes(num_graphs, 6)) * 4  # widths of tables
        assert graph.replays > graph.graphs


def test_a_prompt_is_computed_without_a_graph_and_its_tokens_with_one() -> None:
    with graphs_on_cpu() as graph:
        one = made()
        first = one.generate(requests()[1:2])["1"]
        recorded = graph.graphs
        replays = graph.replays
        again = one.generate(requests()[1:2])["1"]
        assert [t.token for t in again] == [t.token for t in first]
        assert graph.graphs == recorded
        assert graph.replays - replays == len(again) - 1  # all but the prompt's own token
        assert graph.replays == len(first) - 1 - recorded + len(again) - 1


def test_new_weights_are_captured_again() -> None:
    with graphs_on_cpu() as graph:
        one = made()
        tokens_of(one)
        before = graph.graphs
        torch.manual_seed(3)
        for param in one.model.module.parameters():
            param.data = torch.randn_like(param) * 0.3  # at another address
        one.use_new_weights()
        found = tokens_of(one)
        assert graph.graphs > before
        assert graph.living == graph.graphs - before
        plain = made(0)
        plain.model.module.load_state_dict(one.model.module.state_dict())
        assert_equal(found, tokens_of(plain))


def test_an_engine_that_ends_releases_its_graphs() -> None:
    with graphs_on_cpu() as graph:
        one = made()
        one.generate(requests()[1:2])
        assert graph.living == graph.graphs > 0
        one.close()
        assert graph.living == 0


@pytest.mark.parametrize("changes", [MOE, {"quantized": True}])
def test_models_that_graphs_cannot_hold_run_without(changes: dict[str, Any]) -> None:
    with graphs_on_cpu() as graph:
        if changes.pop("quantized", False):
            one = made()
            graphs = one._runner._graphs
            one.model.module.output_layer.quantizer = lambda *given: pytest.fail("not called")
            graphs = DecodeGraphs(one.model.module, one._runner.cache, 3, one._runner._decode)
            assert not graphs._is_possible
        else:
            assert_equal(tokens_of(made(**changes)), tokens_of(made(0, **changes)))
        assert graph.graphs == 0


def test_a_layer_that_reads_the_plan_on_the_host_ends_capture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    view = decode_graphs.BatchView

    class Reading(view):  # type: ignore[misc, valid-type]
        def attend(self, *given: Any, **options: Any) -> Any:
            self.reads_host = True
            return super().attend(*given, **options)

    with graphs_on_cpu() as graph:
        monkeypatch.setattr(decode_graphs, "BatchView", Reading)
        assert_equal(tokens_of(made()), tokens_of(made(0)))
        assert graph.graphs == 0

"""Recorded passes on a CPU: they compute what the pass computes, bit for bit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.device import cpu_kernels
from megatron.core.device.host_graph import Arena, HostGraph
from megatron.core.fusions.rms_norm import norm_rows_alike
from megatron.core.fusions.small_linear import small_linear
from megatron.core.inference.fast_linear import use_fast_linears
from megatron.core.inference.paged_engine.engine import Engine, EngineOptions
from tests.support import selection
from tests.unit.inference.test_engine import MOE, Tokens, engine, requests

pytestmark = pytest.mark.skipif(not cpu_kernels.can_record(), reason="no compiled kernels")

MODELS: dict[str, dict[str, Any]] = {
    "layer norm, GELU": {},
    "groups, gates and RMS norm": {
        "num_query_groups": 2,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
    },
    "window and sink": {"window_size": (7, 0), "softmax_type": "learnable"},
    "softcap": {"attn_logit_softcapping": 3.0},
    "16 bits": {"dtype": torch.bfloat16},
}
FORMATS: dict[str, dict[str, Any]] = {
    "int8 keys": {"kv_cache": "int8"},
    "bf16 keys": {"kv_cache": "bf16"},
    "int8 weights": {"weights": "int8"},
    "bf16 weights": {"weights": "bf16"},
}


def made(
    num_graphs: int = 16, *, weights: Any = "fp32", kv_cache: Any = "auto", **changes: Any
) -> Engine:
    options = EngineOptions(
        page_size=4,
        max_requests=6,
        num_cuda_graphs=num_graphs,
        has_prefix_cache=False,
        kv_cache=kv_cache,
    )
    out = engine(options, 1, {}, **{"dtype": torch.float32, **changes})
    use_fast_linears(out.model.module, weights)
    # The engine looks at the layers when it is made.
    return Engine(out.model, options)


def tokens_of(one: Engine) -> Tokens:
    found = one.generate(requests())
    return {k: [(t.token, t.log_prob) for t in tokens] for k, tokens in found.items()}


def count_replays(monkeypatch: pytest.MonkeyPatch) -> list[HostGraph]:
    """Return a list that gets the graph of each replay."""
    replayed: list[HostGraph] = []
    real = HostGraph.replay

    def replay(graph: HostGraph) -> None:
        replayed.append(graph)
        real(graph)

    monkeypatch.setattr(HostGraph, "replay", replay)
    return replayed


@pytest.mark.feature("Generation: decode steps of a CPU are replayed without Python, bitwise equal")
@pytest.mark.parametrize("name", selection.first(4, [*FORMATS, *MODELS]))
def test_replays_give_the_bits_of_steps_without(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {**MODELS, **FORMATS}[name]
    wanted = tokens_of(made(0, **changes))
    replayed = count_replays(monkeypatch)
    one = made(**changes)
    assert tokens_of(one) == wanted
    first = len(replayed)
    assert tokens_of(one) == wanted
    assert 5 < first < len(replayed) - first  # the second time, no step is recorded


def test_new_weights_are_recorded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    replayed = count_replays(monkeypatch)
    one = made()
    before = tokens_of(one)
    known = list(replayed)  # alive, so that no new object has the id of one of them
    torch.manual_seed(3)
    with torch.no_grad():
        for param in one.model.module.parameters():
            param.data = torch.randn_like(param) * 0.3  # at another address
    one.use_new_weights()
    replayed.clear()
    found = tokens_of(one)
    assert found != before
    assert replayed
    assert not {*map(id, known)} & {*map(id, replayed)}
    plain = made(0)
    plain.model.module.load_state_dict(one.model.module.state_dict())
    plain.use_new_weights()
    assert found == tokens_of(plain)


@pytest.mark.parametrize("changes", [MOE, {"dtype": torch.float64}])
def test_models_that_graphs_cannot_hold_run_without(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    replayed = count_replays(monkeypatch)
    changes = dict(changes)
    assert tokens_of(made(**changes)) == tokens_of(made(0, **changes))
    assert not replayed


def a_pass(x: Tensor, weight: Tensor, total: Tensor) -> Tensor:
    """Kernels, operations of torch, views, an operation in place, and a result of each kind."""
    y = small_linear(x, weight)
    y = y.unflatten(-1, (4, -1)).transpose(1, 2).flatten(1)
    y = norm_rows_alike(y, torch.full((y.shape[-1],), 1.5), torch.ones(y.shape[-1]), 1e-5) + y
    low, high = torch.aminmax(y, dim=-1, keepdim=True)
    total.add_(high - low)
    return torch.softmax(y + total, -1)


def inputs(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(seed)
    return torch.randn(5, 24), torch.randn(32, 24), torch.randn(5, 1)


@torch.no_grad()
def test_a_replay_computes_with_the_values_of_now() -> None:
    args = inputs(0)
    graph = HostGraph(Arena())
    before = args[2].clone()
    with graph.recording():
        out = a_pass(*args)
    assert torch.equal(out, a_pass(args[0], args[1], before))  # recording computes
    result = graph.result(out)
    del out
    for seed in (1, 2):
        new = inputs(seed)
        for old, value in zip(args, new, strict=True):
            old.copy_(value)
        graph.replay()
        assert torch.equal(result, a_pass(*new))
        assert torch.equal(args[2], new[2])


@torch.no_grad()
def test_graphs_share_memory() -> None:
    arena = Arena()
    sizes = []
    graphs = []
    for rows in (1, 7, 300, 300, 300):
        x, weight, total = torch.randn(rows, 2048), torch.randn(2048, 2048), torch.zeros(rows, 1)
        graph = HostGraph(arena)
        with graph.recording():
            for _ in range(6):
                x = small_linear(x, weight) + x
            out = graph.result(x * total)
        del x
        graphs.append((graph, out))
        sizes.append(sum(map(len, arena.blocks.values())))
    for graph, out in graphs:
        out.fill_(7)
        graph.replay()
        assert not out.any()
    block = 300 * 2048 * 4
    assert sizes[2] == sizes[-1] <= 6 * block


@torch.no_grad()
def test_a_block_is_free_when_its_last_view_is_deleted() -> None:
    arena = Arena()
    first = arena.empty(torch.empty(100))
    view = first[3:].view(97, 1)
    at = first.data_ptr()
    del first
    second = arena.empty(torch.empty(100))
    assert second.data_ptr() != at
    assert second.data_ptr() % 64 == at % 64 == 0
    del view
    third = arena.empty(torch.empty(100))
    assert third.data_ptr() == at
    shaped = arena.empty(torch.empty(6, 5, dtype=torch.int16).t())
    assert (shaped.shape, shaped.stride(), shaped.dtype) == ((5, 6), (1, 5), torch.int16)


@pytest.mark.parametrize(
    "look",
    [
        lambda x: x.sum().item(),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: bool((x > 0).any()),
    ],
)
def test_a_pass_that_looks_at_numbers_is_refused(look: Callable[[Tensor], object]) -> None:
    graph = HostGraph(Arena())
    with graph.recording():
        look(torch.ones(3))
    assert graph.refusal is not None
    with pytest.raises(AssertionError, match="cannot be recorded"):
        graph.replay()


def test_recording_ends_with_an_error_of_the_pass() -> None:
    def failing_pass() -> None:
        with HostGraph(Arena()).recording():
            assert cpu_kernels.is_recording()
            raise ValueError("by the pass")

    with pytest.raises(ValueError, match="by the pass"):
        failing_pass()
    assert not cpu_kernels.is_recording()


def test_kernels_of_other_threads_are_not_recorded() -> None:
    x, weight = torch.randn(2, 24), torch.randn(32, 24)
    graph = HostGraph(Arena())
    with graph.recording():
        other = threading.Thread(target=small_linear, args=(x, weight))
        other.start()
        other.join()
    assert not graph._steps

"""In which order layers start collectives, multiply matrices and wait: what overlaps what.

The first rank of two runs alone; its collectives are written down and change nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.core.params.param_init import Init
from megatron.core.tensor_parallel import layers, linear, mappings, weight_gradient
from megatron.core.tensor_parallel.fused_linear_cross_entropy import linear_cross_entropy
from megatron.core.tensor_parallel.weight_gradient import WeightGradQueue
from tests.support.one_process import tiny_config

TOKENS, INPUT, OUTPUT = 8, 6, 5  # of this rank's matrix
NAMES = {
    (TOKENS, OUTPUT): "forward",
    (TOKENS, INPUT): "input gradient",
    (OUTPUT, INPUT): "weight gradient",
}


class Products(TorchDispatchMode):
    """Writes down matrix products by the shape of their result."""

    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self.log = log

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            self.log.append(NAMES[tuple(out.shape)])
        return out


class Started:
    """What an asynchronous collective returns."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait(self) -> None:
        self.log.append(f"wait {self.name}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # a dispatch mode would set it
    written: list[str] = []

    def stand_in(name: str) -> Callable[..., Any]:
        def collective(out: Tensor, *_: Any, async_op: bool = False, **__: Any) -> Any:
            if name != "all_reduce":
                out.zero_()
            written.append(f"start {name}" if async_op else name)
            return Started(name, written) if async_op else None

        return collective

    for module in (linear, mappings, weight_gradient):
        for name in ("all_gather_single", "reduce_scatter_single"):
            if name in vars(module):
                monkeypatch.setattr(module, name, stand_in(name.removesuffix("_single")))
    monkeypatch.setattr(dist, "all_reduce", stand_in("all_reduce"))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    with Products(written):
        yield written
    dist.destroy_process_group()


def build(kind: Any, sequence_parallel: bool, *, fused: bool = False) -> Any:
    layer = kind(
        INPUT * (2 if kind is layers.RowParallelLinear else 1),
        OUTPUT * (2 if kind is layers.ColumnParallelLinear else 1),
        config=tiny_config(sequence_parallel=sequence_parallel),
        init_method=Init("normal", 0.1),
        tp_group=dist.group.WORLD,
        bias=False,
    )
    torch.nn.init.zeros_(layer.weight)
    if fused:
        layer.weight.main_grad = torch.full_like(layer.weight, float("nan"))
        layer.weight.overwrite_main_grad = True
    return layer


def run_column(layer: Any) -> Tensor:
    rows = TOKENS // 2 if layer.sequence_parallel else TOKENS
    return layer(torch.ones(rows, 1, INPUT, requires_grad=True))[0].sum()


def run_loss(layer: Any) -> Tensor:
    rows = TOKENS // 2 if layer.sequence_parallel else TOKENS
    return linear_cross_entropy(
        torch.ones(rows, INPUT, requires_grad=True),
        layer.weight,
        torch.zeros(TOKENS, dtype=torch.int64),
        group=dist.group.WORLD,
        num_columns=OUTPUT,
        sequence_parallel=layer.sequence_parallel,
        is_own=True,
    ).sum()


FORWARD = {False: ["forward"], True: ["all_gather", "forward"]}
BACKWARD = {
    False: ["input gradient", "start all_reduce", "weight gradient", "wait all_reduce"],
    True: [
        "start all_gather",
        "input gradient",
        "start reduce_scatter",
        "wait all_gather",
        "weight gradient",
        "wait reduce_scatter",
    ],
}
INPUT_GRADIENT = {
    False: ["input gradient", "start all_reduce", "wait all_reduce"],
    True: ["input gradient", "start reduce_scatter", "wait reduce_scatter"],
}
TWO_LATER = {
    False: ["weight gradient", "weight gradient"],
    True: [
        "start all_gather",
        "start all_gather",
        "wait all_gather",
        "weight gradient",
        "wait all_gather",
        "weight gradient",
    ],
}


@pytest.mark.feature("Layouts: tensor-parallel collectives run beside weight-gradient products")
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("run", [run_column, run_loss])
def test_collectives_run_beside_the_weight_gradient(
    run: Any, fused: bool, sequence_parallel: bool, log: list[str]
) -> None:
    layer = build(layers.ColumnParallelLinear, sequence_parallel, fused=fused)
    loss = run(layer)
    sums = ["all_reduce"] * 2 if run is run_loss else []
    assert log == [*FORWARD[sequence_parallel], *sums]
    log.clear()
    loss.backward()
    assert log == BACKWARD[sequence_parallel]
    if fused:
        assert layer.weight.grad_added_to_main_grad
        assert not layer.weight.main_grad.isnan().any()


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("run", [run_column, run_loss])
def test_the_next_input_is_gathered_beside_a_deferred_weight_gradient(
    run: Any, sequence_parallel: bool, log: list[str]
) -> None:
    queue = WeightGradQueue()
    layer = build(layers.ColumnParallelLinear, sequence_parallel)
    for _ in range(2):
        loss = run(layer)
        log.clear()
        with queue.collecting():
            loss.backward()
        assert log == INPUT_GRADIENT[sequence_parallel]
    log.clear()
    queue.run()
    assert log == TWO_LATER[sequence_parallel]


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("way", ["at once", "fused", "later"])
def test_a_row_layer_talks_once_in_each_direction(
    way: str, sequence_parallel: bool, log: list[str]
) -> None:
    queue = WeightGradQueue() if way == "later" else None
    layer = build(layers.RowParallelLinear, sequence_parallel, fused=way == "fused")
    loss = layer(torch.ones(TOKENS, 1, INPUT, requires_grad=True))[0].sum()
    assert log == ["forward", "reduce_scatter" if sequence_parallel else "all_reduce"]
    log.clear()
    with nullcontext() if queue is None else queue.collecting():
        loss.backward()
    if queue is not None:
        assert "weight gradient" not in log
        queue.run()
    products = ["input gradient", "weight gradient"]
    gather = ["all_gather"] if sequence_parallel else []
    assert log in (gather + products, gather + products[::-1])

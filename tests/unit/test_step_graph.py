"""A step as one graph: other numbers in the same memory, other shapes eagerly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from megatron.training.data.loaders import ReadAhead, read_ahead
from megatron.training.runtime.step_graph import StepGraph
from tests.support.graph_stand_in import graphs_on_cpu


class Model(nn.Linear):
    """Its gradients lie in no buffer."""

    def finish_param_sync(self, *, values: bool = True) -> None:
        """Nothing is gathered."""


def passes(model: Model, data: Iterator[dict[str, Tensor]] | None) -> list[dict[str, Tensor]]:
    assert data is not None
    losses = [model(batch["x"]).square().sum() for batch in data]
    torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]
    return [{"loss": loss.detach()} for loss in losses]


def test_a_step_of_another_size_runs_eagerly_and_is_recorded_anew() -> None:
    model, graph = Model(3, 2), StepGraph(num_warmup_steps=1)
    counts = [2, 2, 2, 3, 3, 3]
    batches = [{"x": torch.randn(4, 3)} for _ in range(sum(counts))]
    data, rest = ReadAhead(iter(batches)), iter(batches)
    replays = []
    with graphs_on_cpu() as graphs:
        for count in counts:
            model.zero_grad()
            found: Any = graph.run(lambda d: passes(model, d), data, count, [model])
            read_ahead(data, count)
            grads = [p.grad for p in model.parameters()]
            model.zero_grad()
            expected = passes(model, iter([next(rest) for _ in range(count)]))
            assert found == expected
            for grad, param in zip(grads, model.parameters(), strict=True):
                assert grad is not None
                assert param.grad is not None
                assert grad.equal(param.grad)
            replays.append(graphs.replays)
        assert graphs.living == 1
        graph.release()
        assert graphs.living == 0
    assert replays == [0, 1, 2, 2, 3, 4]

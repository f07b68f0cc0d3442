"""Weight gradients of tensor-parallel layers: computed later, they are the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.core.parallel.process_groups_config import create_process_groups, make_grids
from megatron.core.tensor_parallel.weight_gradient import WeightGradQueue
from tests.distributed.test_tensor_parallel_model import batch, build
from tests.support.ranks import run_ranks


def later_and_at_once(rank: int, world_size: int, sequence_parallel: bool) -> None:
    groups = create_process_groups(*make_grids(world_size, tp=2))
    tokens, labels, positions = batch()

    def gradients(queue: WeightGradQueue | None) -> dict[str, Any]:
        model = build("llama", groups, 128, sequence_parallel=sequence_parallel)
        for factor in (1.0, 0.5):
            loss = factor * model(tokens, positions, None, labels=labels).mean()
            if queue is None:
                loss.backward()
                continue
            with queue.collecting():
                loss.backward()
        if queue is not None:
            assert len(queue) == 2 * (4 * 2 + 1)  # micro-batches, matrices of two layers, output
            queue.run(3)
            queue.run()
        return {name: p.grad for name, p in model.named_parameters()}

    at_once, later = gradients(None), gradients(WeightGradQueue())
    for name, grad in at_once.items():
        assert torch.equal(later[name], grad), name


@pytest.mark.feature("Layouts: weight gradients computed apart from backward, the same bits")
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_deferred_gradients_of_divided_layers_are_the_same_bits(sequence_parallel: bool) -> None:
    run_ranks(later_and_at_once, 2, sequence_parallel)

"""What ranks compute again, collectives and dropout included, gives the bits of what they keep."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.parallel.process_groups_config import create_process_groups, make_grids
from megatron.core.tensor_parallel.random import model_parallel_seed
from tests.distributed.test_tensor_parallel_model import build, loss_and_gradients
from tests.support.ranks import run_ranks

KINDS: dict[str, dict[str, Any]] = {
    "uniform": {"recompute_method": "uniform", "recompute_num_layers": 2},
    "block": {"recompute_method": "block", "recompute_num_layers": 1},
    "shared": {
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
        "distribute_saved_activations": True,
    },
    "core_attn": {},
    "modules": {"recompute_modules": ("core_attn", "layernorm", "mlp")},
}


def kept_and_computed_again(rank: int, world_size: int, sequence_parallel: bool) -> None:
    groups = create_process_groups(*make_grids(world_size, tp=2))

    def training(**kind: Any) -> tuple[Tensor, dict[str, Any], Tensor]:
        model_parallel_seed(3, tp_rank=rank)
        more: Any = {"sequence_parallel": sequence_parallel, **kind}
        model = build("gpt2", groups, 104, hidden_dropout=0.3, attention_dropout=0.3, **more)
        loss, _ = loss_and_gradients(model)
        return loss, {n: p.grad for n, p in model.named_parameters()}, torch.rand(3)

    loss, grads, after = training()
    for name, kind in KINDS.items():
        if kind.get("distribute_saved_activations") and sequence_parallel:
            continue  # refused
        full = "recompute_method" in kind
        kind = {"recompute_granularity": "full" if full else "selective", **kind}
        loss_again, grads_again, after_again = training(**kind)
        assert torch.equal(loss, loss_again), name
        for param, grad in grads.items():
            assert torch.equal(grads_again[param], grad), f"{name}: {param}"
        assert torch.equal(after, after_again), f"{name}: the streams end elsewhere"


@pytest.mark.feature("Layouts: recomputation with tensor and sequence parallelism, the same bits")
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_divided_layers_recompute_the_same_bits(sequence_parallel: bool) -> None:
    run_ranks(kept_and_computed_again, 2, sequence_parallel)

"""Megatron Core's API of state-space layers."""

from __future__ import annotations

import pytest
import torch

from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.models.mamba.mamba_layer_specs import mamba_stack_spec
from megatron.core.parallel.context_parallel_partition import held_tokens
from megatron.core.params.param_info import name_parameters
from megatron.core.params.param_init import initialize_parameters
from megatron.core.ssm.mamba_block import MambaStack
from megatron.core.ssm.mamba_context_parallel import (  # type: ignore[import-not-found]
    _undo_attention_load_balancing,
)
from megatron.core.ssm.mamba_hybrid_layer_allocation import Symbols
from megatron.core.ssm.mamba_mixer import (  # type: ignore[attr-defined]
    MambaMixer,
    _split_tensor_factory,
)
from tests.support.one_process import one_process_groups, tiny_config

SIZES = {"mamba_state_dim": 6, "mamba_head_dim": 8, "mamba_num_groups": 1}


def test_a_stack_is_built_and_run_without_groups() -> None:
    """Positional arguments are in Megatron Core's order; the result is that with groups."""
    config = tiny_config(**SIZES, is_hybrid_model=True)
    pattern = Symbols.MAMBA + Symbols.MLP
    submodules = mamba_stack_spec.submodules
    stacks = [
        MambaStack(  # type: ignore[call-arg, misc]
            config, submodules, False, True, 0.0, 0.0, pattern, True, True, "cpu", torch.float32
        ),
        MambaStack(
            config,
            submodules,
            hybrid_override_pattern=pattern,
            pg_collection=one_process_groups(),
        ),
    ]
    x = torch.randn(5, 2, 32, generator=torch.Generator().manual_seed(0))
    results = []
    for stack in stacks:
        name_parameters(stack)
        initialize_parameters(stack, 7)
        results.append(stack(x, None, None, None))
    assert results[0].equal(results[1])


def test_a_mixer_refuses_arguments_that_it_does_not_know() -> None:
    submodules = mamba_stack_spec.submodules.mamba_layer.submodules.mixer.submodules
    with pytest.raises(TypeError, match="D_has_hdim"):
        MambaMixer(tiny_config(**SIZES), submodules, 32, D_has_hdim=True)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_tokens_of_context_parallel_ranks_return_to_their_order(size: int) -> None:
    tokens = torch.arange(12 * 2).view(12, 2)
    gathered = torch.cat([tokens[held_tokens((12,), rank, size)] for rank in range(size)])
    assert _undo_attention_load_balancing(gathered, size).equal(tokens)


def test_the_parts_of_a_projection_are_saved_as_tensors_of_their_own() -> None:
    rows = torch.arange(12.0).view(6, 2)
    entry = ShardedTensor.from_rank_offsets("in_proj.weight", rows)
    factory = _split_tensor_factory(entry, [2, 4], ["z", "x"], 0)
    built = factory.build()
    assert [part.key for part in built] == ["in_proj.weight.z", "in_proj.weight.x"]
    assert built[1].data.equal(rows[2:])
    assert factory.merge_fn([part.data for part in built]).equal(rows)

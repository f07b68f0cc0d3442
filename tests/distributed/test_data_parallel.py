"""Replicas together compute what one process computes on the joint batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.distributed.grad_buffer import gradient_of
from megatron.core.parallel.process_groups_config import create_process_groups, make_grids
from megatron.core.params.param_info import ParamInfo, set_info
from megatron.core.pipeline_parallel import StepHooks, get_forward_backward_func
from megatron.core.rerun.results import RerunMode
from megatron.core.rerun.state_machine import (
    get_rerun_state_machine,
    initialize_rerun_state_machine,
)
from tests.support import tolerances
from tests.support.one_rank_training import ModelConfig, TinyModel, mean_loss, token_batch
from tests.support.ranks import run_ranks

MICROBATCHES = 2


def wrap(model: nn.Module, *, per_token: bool = False, layout: Any = None, **options: Any):
    groups = create_process_groups(*make_grids(dist.get_world_size(), **(layout or {})))
    return DistributedDataParallel(
        ModelConfig(calculate_per_token_loss=per_token),
        DistributedDataParallelConfig(**options),
        model,
        pg_collection=groups,
    )


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: gradient_of(p).clone() for name, p in model.named_parameters()}


def _replica(rank: int, world_size: int, options: dict, dtype: torch.dtype) -> list[dict]:
    """Gradients of two steps, each of several micro-batches."""
    ddp = wrap(TinyModel(dtype=dtype), **options)
    steps = []
    for step in range(2):
        ddp.zero_grad_buffer()
        mine = token_batch(8, seed=step).chunk(world_size)[rank].chunk(MICROBATCHES)
        for i, tokens in enumerate(mine):
            if i < MICROBATCHES - 1:
                with ddp.no_sync():
                    (mean_loss(ddp, tokens) / MICROBATCHES).backward()
            else:
                (mean_loss(ddp, tokens) / MICROBATCHES).backward()
        finalize_model_grads([ddp])
        steps.append(gradients(ddp.module))
    return steps


def joint_gradients(dtype: torch.dtype) -> list[dict]:
    model, steps = TinyModel(dtype=dtype), []
    for step in range(2):
        model.zero_grad()
        mean_loss(model, token_batch(8, seed=step)).backward()
        steps.append({n: p.grad.clone() for n, p in model.named_parameters()})
    return steps


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"overlap_grad_reduce": True},
        {"overlap_grad_reduce": True, "bucket_size": 1},
        {"overlap_grad_reduce": True, "ddp_num_buckets": 3, "average_in_collective": True},
        {"pad_buckets_for_high_nccl_busbw": True, "average_in_collective": True},
    ],
)
def test_the_gradient_of_replicas_is_that_of_the_joint_batch(options: dict):
    first, second = run_ranks(_replica, 2, options, torch.float32)
    torch.testing.assert_close(first, second, **tolerances.BITWISE)
    torch.testing.assert_close(first, joint_gradients(torch.float32), **tolerances.GRADIENT)


@pytest.mark.feature(
    "Training: gradients reduced in buckets while backward runs, with the same bits as after it"
)
def test_overlap_and_bucket_size_change_no_bit():
    results = [
        run_ranks(_replica, 2, options, torch.float32)[0]
        for options in ({}, {"overlap_grad_reduce": True, "bucket_size": 100})
    ]
    torch.testing.assert_close(*results, **tolerances.BITWISE)


@pytest.mark.parametrize("in_fp32", [True, False])
def test_the_reduction_runs_in_the_dtype_asked_for(in_fp32: bool):
    options = {"grad_reduce_in_fp32": in_fp32, "overlap_grad_reduce": True}
    first, second = run_ranks(_replica, 2, options, torch.bfloat16)
    torch.testing.assert_close(first, second, **tolerances.BITWISE)
    dtype = torch.float32 if in_fp32 else torch.bfloat16
    assert {grad.dtype for step in first for grad in step.values()} == {dtype}
    expected = [
        {name: grad.to(dtype) for name, grad in step.items()}
        for step in joint_gradients(torch.bfloat16)
    ]
    torch.testing.assert_close(first, expected, **tolerances.of(torch.bfloat16))


def _other_way_round(rank: int, world_size: int) -> dict:
    """Each rank finishes its parameters in another order, and leaves one out."""
    model = nn.ModuleList(nn.Linear(3, 3, bias=False) for _ in range(4))
    ddp = wrap(model, overlap_grad_reduce=True, bucket_size=1)
    for _ in range(2):
        ddp.zero_grad_buffer()
        used = [m for i, m in enumerate(model) if i != rank]
        x = torch.ones(1, 3)
        for layer in used if rank == 0 else reversed(used):
            x = x.detach() + layer(x)
            layer.weight.sum().backward()
        ddp.finish_grad_sync()
    return gradients(model)


def test_ranks_that_finish_parameters_in_other_orders_meet_in_the_same_buckets():
    first, second = run_ranks(_other_way_round, 2)
    torch.testing.assert_close(first, second, **tolerances.BITWISE)
    shares = [float(grad.mean()) for grad in first.values()]
    assert shares == [0.5, 0.5, 1.0, 1.0]


def _with_experts(rank: int, world_size: int, average: bool) -> dict:
    model = nn.ModuleDict({"dense": nn.Linear(2, 2, bias=False), "expert": nn.Linear(2, 2)})
    for name, p in model.named_parameters():
        set_info(p, ParamInfo(global_shape=tuple(p.shape), is_expert=name.startswith("expert")))
    ddp = wrap(model, layout={"ep": 2}, average_in_collective=average)
    for p in model.parameters():
        (p.sum() * (rank + 1)).backward()
    ddp.finish_grad_sync()
    return {name: float(grad.mean()) for name, grad in gradients(model).items()}


@pytest.mark.parametrize("average", [False, True])
def test_experts_are_reduced_among_their_copies_and_divided_by_all_replicas(average: bool):
    # Four ranks hold experts {0, 1} twice: rank pairs (0, 2) and (1, 3).
    results = run_ranks(_with_experts, 4, average)
    assert [r["dense.weight"] for r in results] == [2.5] * 4
    assert [r["expert.weight"] for r in results] == [1.0, 1.5, 1.0, 1.5]


def _nan_in_one_rank(rank: int, world_size: int, check: bool) -> str:
    model = TinyModel()
    ddp = wrap(model, check_for_nan_in_grad=check, overlap_grad_reduce=True)
    if rank == 1:
        model.second.bias.register_hook(lambda grad: grad * float("inf"))
    mean_loss(ddp, token_batch(2)).backward()
    try:
        ddp.finish_grad_sync()
    except FloatingPointError as error:
        return str(error)
    return "no error"


@pytest.mark.feature("Training: a NaN or infinity names its step, rank and parameter")
def test_a_nan_is_reported_by_the_rank_that_made_it_with_the_parameter():
    quiet, loud = run_ranks(_nan_in_one_rank, 2, True)
    assert quiet == "no error"
    assert loud == (
        "rank 1: found NaN in local grad norm for bucket #0 in backward pass before data-parallel "
        "communication collective; rank 1 has a NaN or infinite gradient in second.bias: nan"
    )


def _large_on_rank_1(rank: int, world_size: int, sharded: bool) -> list[int]:
    """Passes of each step; a gradient of rank 1 is much larger once, in the last step but one."""
    model = TinyModel()
    passes = []
    factors = iter([1.0] * 150 + [1e6] + [1.0] * 2)
    model.second.bias.register_hook(lambda grad: grad * (next(factors) if rank == 1 else 1.0))
    ddp = wrap(
        model,
        check_for_nan_in_grad=False,
        check_for_large_grads=True,
        use_distributed_optimizer=sharded,
    )
    initialize_rerun_state_machine(mode=RerunMode.VALIDATE_RESULTS)
    machine = get_rerun_state_machine()
    for _ in range(152):
        passes.append(0)
        while machine.should_run_forward_backward(None):
            passes[-1] += 1
            ddp.zero_grad_buffer()
            mean_loss(ddp, token_batch(2)).backward()
            ddp.finish_grad_sync()
        assert machine.should_checkpoint_and_exit() == (False, False, 0)
    return passes[149:]


@pytest.mark.parametrize("sharded", [False, True])
def test_a_step_with_large_gradients_on_one_rank_runs_again_on_all(sharded: bool):
    assert run_ranks(_large_on_rank_1, 2, sharded) == [[1, 2, 1]] * 2


def test_nothing_is_checked_when_the_run_does_not_ask():
    assert run_ranks(_nan_in_one_rank, 2, False) == ["no error"] * 2


def _broadcast(rank: int, world_size: int) -> dict:
    ddp = wrap(TinyModel(seed=rank))
    ddp.broadcast_params()
    return ddp.state_dict()


def test_parameters_are_broadcast_from_the_first_replica():
    for state in run_ranks(_broadcast, 2):
        torch.testing.assert_close(state, TinyModel(seed=0).state_dict(), **tolerances.BITWISE)


def _per_token(rank: int, world_size: int) -> dict:
    """Rank 0 has one sequence, rank 1 three: sums are divided by the tokens of both."""
    ddp = wrap(TinyModel(), per_token=True)
    tokens = token_batch(4)[:1] if rank == 0 else token_batch(4)[1:]
    num_tokens = torch.tensor(tokens[:, 1:].numel())
    (mean_loss(ddp, tokens) * num_tokens).backward()
    finalize_model_grads([ddp], num_tokens)
    return gradients(ddp.module)


def test_a_loss_per_token_does_not_depend_on_how_tokens_are_spread():
    model = TinyModel()
    mean_loss(model, token_batch(4)).backward()
    expected = {n: p.grad for n, p in model.named_parameters()}
    for grads in run_ranks(_per_token, 2):
        torch.testing.assert_close(grads, expected, **tolerances.GRADIENT)


def _cut_over_sequence(rank: int, world_size: int, per_token: bool) -> dict:
    """Each of two context-parallel ranks has half of the tokens, unevenly masked."""
    ddp = wrap(TinyModel(), per_token=per_token, layout={"cp": 2})
    tokens, mask = token_batch(4), uneven_mask()
    half = slice(3 * rank, 3 * rank + 3)

    def step(data: Any, model: nn.Module) -> Any:
        def loss_func(logits: Tensor) -> Any:
            targets = tokens[:, 1:][:, half].flatten()
            losses = F.cross_entropy(logits.flatten(0, 1), targets, reduction="none")
            return (losses * mask[:, half].flatten()).sum(), mask[:, half].sum(), {}

        return model(tokens[:, :-1][:, half]), loss_func

    get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=None,
        model=[ddp],
        num_microbatches=1,
        seq_length=6,
        micro_batch_size=4,
        pg_collection=ddp.groups,
        hooks=StepHooks(finalize_model_grads_func=finalize_model_grads),
    )
    return gradients(ddp.module)


def uneven_mask() -> Tensor:
    mask = torch.ones(4, 6)
    mask[:2, :4] = 0
    return mask


@pytest.mark.parametrize("per_token", [False, True])
def test_a_sequence_cut_over_ranks_has_the_gradient_of_the_whole(per_token: bool):
    model = TinyModel()
    logits, targets = model(token_batch(4)[:, :-1]), token_batch(4)[:, 1:]
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    ((losses * uneven_mask().flatten()).sum() / uneven_mask().sum()).backward()
    expected = {n: p.grad for n, p in model.named_parameters()}
    for grads in run_ranks(_cut_over_sequence, 2, per_token):
        torch.testing.assert_close(grads, expected, **tolerances.GRADIENT)


def _partial(rank: int, world_size: int) -> tuple[dict, float]:
    """Two tensor-parallel ranks by two replicas; the norm's gradient is partial."""
    model = nn.ModuleDict({"norm": nn.LayerNorm(2), "linear": nn.Linear(2, 2, bias=False)})
    for name, p in model.named_parameters():
        partial = name.startswith("norm")
        set_info(p, ParamInfo(global_shape=tuple(p.shape), sequence_parallel=partial))
    ddp = wrap(model, layout={"tp": 2})
    tp, dp = ddp.groups.tp.rank(), ddp.groups.dp.rank()
    (sum(p.sum() for p in model.parameters()) * 10**tp * (1 + dp)).backward()
    finalize_model_grads([ddp])
    return {name: float(grad.mean()) for name, grad in gradients(model).items()}


def test_gradients_that_are_partial_over_the_sequence_are_summed_over_tp():
    results = run_ranks(_partial, 4)
    assert [r["norm.weight"] for r in results] == [16.5] * 4
    assert [r["linear.weight"] for r in results] == [1.5, 15.0, 1.5, 15.0]


def _partial_and_unused(rank: int, world_size: int) -> float:
    model = nn.LayerNorm(2)
    for p in model.parameters():
        set_info(p, ParamInfo(global_shape=(2,), sequence_parallel=True))
    ddp = wrap(model, layout={"tp": 2})
    if rank == 1:
        model.weight.sum().backward()
    finalize_model_grads([ddp])
    return float(gradient_of(model.weight).mean())


def test_a_rank_without_a_partial_gradient_still_takes_part_in_the_sum():
    assert run_ranks(_partial_and_unused, 2) == [1.0, 1.0]

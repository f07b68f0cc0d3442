"""Micro-batches of one step on one stage."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.config.errors import ConfigError, NonFiniteError
from megatron.core.diagnostics.timers import Timers
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.distributed.grad_buffer import gradient_of
from megatron.core.distributed.non_finite import LossCheck, naming_step
from megatron.core.parallel import parallel_state
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.pipeline_parallel import StepHooks, get_forward_backward_func
from megatron.core.rerun.results import RerunMode
from megatron.core.rerun.state_machine import RerunStateMachine
from tests.support import tolerances
from tests.support.one_rank_training import ModelConfig, TinyModel, mean_loss, token_batch


def token_losses(logits: Tensor, tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    losses = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    return (losses * mask.flatten()).sum(), mask.sum()


def step_with_token_losses(data: Iterator[tuple[Tensor, Tensor]], model: nn.Module) -> Any:
    tokens, mask = next(data)

    def loss_func(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        loss, count = token_losses(output, tokens, mask)
        return loss, count, {"lm loss": torch.stack([loss.detach(), count])}

    return model(tokens[:, :-1]), loss_func


def step_with_mean_loss(data: Iterator[tuple[Tensor, Tensor]], model: nn.Module) -> Any:
    tokens, _ = next(data)

    def loss_func(output: Tensor, non_loss_data: bool = False) -> Any:
        if non_loss_data:
            return output.shape
        loss = F.cross_entropy(output.flatten(0, 1), tokens[:, 1:].flatten())
        return loss, {"lm loss": loss.detach()}

    return model(tokens[:, :-1]), loss_func


def run(
    model: nn.Module,
    groups: ProcessGroupCollection | None,
    *,
    num_microbatches: int = 1,
    step: Any = step_with_mean_loss,
    per_token: bool = False,
    masked: bool = False,
    **more: Any,
) -> list[Any]:
    tokens = token_batch(4)
    mask = torch.ones(4, 6)
    if masked:
        mask[0, 1:] = 0
        mask[2, :3] = 0
    batches = zip(tokens.chunk(num_microbatches), mask.chunk(num_microbatches), strict=True)
    return get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iter(batches),
        model=model,
        num_microbatches=num_microbatches,
        seq_length=6,
        micro_batch_size=4 // num_microbatches,
        pg_collection=groups,
        **{"config": ModelConfig(calculate_per_token_loss=per_token)} | more,
    )


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: gradient_of(p).clone() for name, p in model.named_parameters()}


def wrapped(
    model: nn.Module, groups: ProcessGroupCollection, per_token: bool = False
) -> DistributedDataParallel:
    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    config = ModelConfig(calculate_per_token_loss=per_token)
    return DistributedDataParallel(config, ddp_config, model, pg_collection=groups)


@pytest.mark.parametrize("num_microbatches", [1, 2, 4])
@pytest.mark.parametrize("step", [step_with_mean_loss, step_with_token_losses])
def test_the_gradient_does_not_depend_on_the_microbatch_size(
    alone: ProcessGroupCollection, num_microbatches: int, step: Any
):
    model, plain = TinyModel(), TinyModel()
    mean_loss(plain, token_batch(4)).backward()
    reported = run(wrapped(model, alone), alone, num_microbatches=num_microbatches, step=step)
    assert len(reported) == num_microbatches
    torch.testing.assert_close(gradients(model), gradients(plain), **tolerances.GRADIENT)


def test_the_schedule_calls_the_functions_that_a_project_sets_in_the_config(
    alone: ProcessGroupCollection,
) -> None:
    model, plain = TinyModel(), TinyModel()
    mean_loss(plain, token_batch(4)).backward()
    calls: list[tuple[Any, ...]] = []
    config = ModelConfig()
    config.grad_scale_func = lambda loss: 4.0 * loss
    config.finalize_model_grads_func = lambda *given: calls.append(given)
    ddp = wrapped(model, alone)
    run(ddp, alone, num_microbatches=2, config=config)
    expected = {name: 4.0 * grad for name, grad in gradients(plain).items()}
    torch.testing.assert_close(gradients(model), expected, **tolerances.GRADIENT)
    assert calls == [([ddp], None)]
    with torch.no_grad():
        run(ddp, alone, num_microbatches=2, config=config, forward_only=True)
    assert len(calls) == 1


@pytest.mark.feature(
    "Training: loss per token, independent of micro-batches, replicas and sequence cuts"
)
@pytest.mark.parametrize("num_microbatches", [1, 2, 4])
def test_a_loss_per_token_weighs_every_token_alike(
    alone: ProcessGroupCollection, num_microbatches: int
):
    whole, model = TinyModel(), TinyModel()
    more = {"step": step_with_token_losses, "per_token": True, "masked": True}
    hooks = StepHooks(finalize_model_grads_func=finalize_model_grads)
    ddp = wrapped(model, alone, per_token=True)
    run(ddp, alone, hooks=hooks, num_microbatches=num_microbatches, **more)
    mask = torch.ones(4, 6)
    mask[0, 1:] = 0
    mask[2, :3] = 0
    tokens = token_batch(4)
    loss, count = token_losses(whole(tokens[:, :-1]), tokens, mask)
    (loss / count).backward()
    torch.testing.assert_close(gradients(model), gradients(whole), **tolerances.GRADIENT)


def test_a_loss_per_token_needs_the_number_of_tokens(alone: ProcessGroupCollection):
    with pytest.raises(ConfigError, match=r"return \(sum of losses, number of tokens, reported\)"):
        run(TinyModel(), alone, per_token=True)


def test_a_microbatch_without_loss_bearing_tokens_adds_nothing(alone: ProcessGroupCollection):
    def no_tokens(data: Any, model: nn.Module) -> Any:
        tokens, _ = next(data)
        return step_with_token_losses(iter([(tokens, torch.zeros(4, 6))]), model)

    model = TinyModel()
    run(wrapped(model, alone), alone, step=no_tokens)
    assert all((grad == 0).all() for grad in gradients(model).values())


def test_evaluation_reports_losses_and_builds_no_graph(alone: ProcessGroupCollection):
    model = TinyModel()
    reported = run(wrapped(model, alone), alone, num_microbatches=2, forward_only=True)
    assert [float(r["lm loss"]) for r in reported] == pytest.approx(
        [mean_loss(model, part).item() for part in token_batch(4).chunk(2)]
    )
    assert all(p.grad is None for p in model.parameters())


def test_what_is_no_loss_can_be_collected(alone: ProcessGroupCollection):
    shapes = run(TinyModel(), alone, forward_only=True, collect_non_loss_data=True)
    assert shapes == [(4, 6, 13)]


def test_the_hooks_are_called_in_their_places(alone: ProcessGroupCollection):
    calls: list[str] = []
    timers = Timers(2, "max")

    def scale(loss: Tensor) -> Tensor:
        calls.append("scale")
        return loss * 8

    hooks = StepHooks(
        grad_scale_func=scale,
        loss_check_func=lambda loss, microbatch: calls.append(f"check {microbatch}"),
        finalize_model_grads_func=lambda chunks, tokens: calls.append(f"finalize {tokens}"),
        timers=timers,
    )
    model, plain = TinyModel(), TinyModel()
    run([model], alone, num_microbatches=2, hooks=hooks)
    assert calls == ["check 0", "scale", "check 1", "scale", "finalize None"]
    run(plain, alone, num_microbatches=2)
    expected = {name: 8 * grad for name, grad in gradients(plain).items()}
    torch.testing.assert_close(gradients(model), expected, **tolerances.BITWISE)
    assert set(timers.times_s()) == {"forward-compute", "backward-compute", "all-grads-sync"}


def test_only_the_last_backward_pass_reduces(alone: ProcessGroupCollection):
    ddp = wrapped(TinyModel(dtype=torch.bfloat16), alone)
    seen = []
    hooks = StepHooks(loss_check_func=lambda loss, i: seen.append(ddp.is_last_microbatch))
    run(ddp, alone, num_microbatches=4, hooks=hooks)
    assert seen == [False, False, False, True]


def test_without_groups_the_installed_ones_are_used(alone: ProcessGroupCollection):
    with pytest.raises(AssertionError, match="initialize_model_parallel"):
        run(TinyModel(), None)
    parallel_state.install(alone)
    try:
        assert len(run(TinyModel(), None)) == 1
    finally:
        parallel_state.destroy_model_parallel()


def test_a_loss_that_is_not_finite_is_named_by_step_rank_and_microbatch(
    alone: ProcessGroupCollection,
):
    model = TinyModel()
    with torch.no_grad():
        model.norm.bias.fill_(float("nan"))
    check = LossCheck()
    hooks = StepHooks(loss_check_func=check, finalize_model_grads_func=lambda *_: check.check())
    message = "step 7: rank 0: found NaN in local forward loss calculation of micro-batch 0: nan"
    with pytest.raises(NonFiniteError, match=message):  # noqa: SIM117
        with naming_step(7):
            run(model, alone, hooks=hooks)


def test_a_spiky_loss_is_computed_again_and_used():
    machine = RerunStateMachine(mode=RerunMode.VALIDATE_RESULTS)
    values = iter([1.0] * 100 + [9.0, 10.0, 1.0])
    outcomes = []
    check = LossCheck(machine, for_nan=False, for_spikes=True)
    for _ in range(102):
        while machine.should_run_forward_backward(None):
            check(torch.tensor(next(values)), 0)
            check.check()
        outcomes.append(machine.should_checkpoint_and_exit())
    assert outcomes == [(False, False, 0)] * 102
    assert next(values, None) is None, "the spike of 10 was computed again, that of 9 was not"

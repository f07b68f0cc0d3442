"""The GRPO loss: TRL's numbers (tests/golden/trl_grpo.json), in any split into micro-batches."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.post_training.rl.objective import grpo_loss, score_labels
from megatron.post_training.rl.rounds import (
    Rollouts,
    group_advantages,
    step_batches,
    trim_rows,
)
from megatron.training.config.run import RunConfig
from tests.support.command_lines import run_of
from tests.support.one_process import one_process_groups, one_rank
from tests.support.ranks import run_ranks

GOLDEN: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "golden/trl_grpo.json").read_text()
)
GIVEN = {name: torch.tensor(values) for name, values in GOLDEN["given"].items()}
ROWS, LENGTH = GIVEN["ids"].shape
FLAGS = {
    "beta": "--grpo-kl-beta",
    "epsilon_low": "--grpo-clamp-eps-lower",
    "epsilon_high": "--grpo-clamp-eps-upper",
    "entropy": "--grpo-entropy-term-weight",
    "truncation": "--rl-inference-logprobs-is-correction --rl-importance-sampling-truncation-coef",
    "loss_type": "--grpo-loss-type",
}
DEFAULTS = {"beta": 0, "epsilon_low": 0.1, "epsilon_high": 0.2}


def config_of(case: dict[str, Any], micro_batch_size: int = ROWS) -> RunConfig:
    words = [
        f"{FLAGS[name]} {value}" for name, value in {**DEFAULTS, **case}.items() if name in FLAGS
    ]
    iterations = 1 if "on_policy" in case else 2
    return run_of(
        "--perform-rl-step --langrl-env-config e --pretrained-checkpoint c --seq-length "
        f"{LENGTH} --micro-batch-size {micro_batch_size} --global-batch-size {ROWS} "
        f"--grpo-prompts-per-step 2 --grpo-group-size 3 --grpo-iterations {iterations} "
        f"--rl-max-response-length {LENGTH - GOLDEN['prompt']} {' '.join(words)}",
        without=("--mock-data", "--micro-batch-size", "--seq-length"),
    )


def rollouts_of_golden(is_on_policy: bool = False) -> Rollouts:
    mask = GIVEN["mask"]
    prompt = GOLDEN["prompt"]

    def full(values: Tensor) -> Tensor:
        out = torch.zeros(ROWS, LENGTH)
        out[:, prompt - 1 : -1] = values * mask
        return out

    is_token = torch.cat([torch.ones(ROWS, prompt), mask], 1)
    ends = is_token.sum(1).long()
    return Rollouts(
        tokens=(GIVEN["ids"] * is_token).long(),
        bounds=torch.stack([torch.full_like(ends, prompt), ends], 1),
        sampled_log_probs=full(GIVEN["sampled"]),
        rewards=GIVEN["rewards"],
        is_finished=torch.ones(ROWS, dtype=torch.bool),
        old_log_probs=None if is_on_policy else full(GIVEN["old"]),
        reference_log_probs=full(GIVEN["reference"]),
    )


def trained(case: dict[str, Any], size: int = ROWS) -> tuple[float, Tensor, dict[str, float]]:
    """Return loss, gradient, and the logged values of a step with micro-batches of ``size``."""
    config = config_of(case, size)
    policy = nn.Parameter(GIVEN["weight"].clone())
    groups = one_process_groups()
    batches = step_batches(config, rollouts_of_golden("on_policy" in case), torch.arange(ROWS), 0)
    total = 0.0
    sums: dict[str, Tensor] = {}
    for batch in batches:
        logits = policy[batch["tokens"]]
        whole = {"old_log_probs": None, **batch}
        loss, count, reported = grpo_loss(config, groups, whole, logits)
        (loss / count / len(batches)).backward()  # as LossRule scales it
        total += float(loss.detach() / count) / len(batches)
        for name, pair in reported.items():
            sums[name] = sums.get(name, torch.zeros(2)) + pair
    assert policy.grad is not None
    return total, policy.grad, {n: float(s[0] / s[1]) for n, s in sums.items()}


@pytest.mark.feature("RL: GRPO's loss and gradients equal TRL's to 1e-6")
@pytest.mark.parametrize("name", GOLDEN["cases"])
def test_loss_and_gradient_are_those_of_trl(name: str) -> None:
    golden = GOLDEN["cases"][name]
    loss, gradient, logged = trained(golden["case"])
    assert loss == pytest.approx(golden["loss"], abs=1e-6)
    torch.testing.assert_close(gradient, torch.tensor(golden["gradient"]), atol=1e-6, rtol=1e-6)
    assert logged["grpo loss"] == pytest.approx(golden["loss"], abs=1e-6)
    for key in ("clip fraction", "entropy", "kl"):
        if golden[key] is not None:
            assert logged[key] == pytest.approx(golden[key], abs=1e-6)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("kind", ["dapo", "grpo", "dr_grpo"])
def test_the_loss_does_not_depend_on_micro_batches(kind: str, size: int) -> None:
    case = {"loss_type": kind, "beta": 0.3, "entropy": 0.1}
    whole, gradient, logged = trained(case)
    parts, of_parts, logged_of_parts = trained(case, size)
    assert parts == pytest.approx(whole, abs=1e-6)
    assert logged_of_parts == pytest.approx(logged, abs=1e-6)
    torch.testing.assert_close(of_parts, gradient, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_are_those_of_trl(scale: str) -> None:
    rl = run_of(f"--grpo-scale-rewards {scale} --grpo-group-size {GOLDEN['group']}").rl
    found = group_advantages(GIVEN["rewards"], rl)
    torch.testing.assert_close(found, torch.tensor(GOLDEN["advantages"][scale]))


def test_groups_with_equal_rewards_can_be_left_out() -> None:
    config = config_of({"loss_type": "grpo"})
    filtered = run_of("--grpo-filter-groups-with-same-reward --grpo-group-size 3").rl
    rollouts = rollouts_of_golden()
    rollouts.rewards[:3] = 1.0
    (both,) = step_batches(config, rollouts, torch.arange(ROWS), 0)
    (kept,) = step_batches(replace(config, rl=filtered), rollouts, torch.arange(ROWS), 0)
    assert not kept["weights"][:3].any()
    per_token = kept["weights"].sum(), both["weights"].sum()
    assert float(per_token[0]) == pytest.approx(float(per_token[1]), rel=1e-6)


def test_no_token_outside_of_an_answer_has_weight() -> None:
    (batch,) = step_batches(config_of({}), rollouts_of_golden(), torch.arange(ROWS), 0)
    is_answer = rollouts_of_golden().is_answer
    assert ((batch["weights"] > 0) == is_answer).all()
    assert is_answer.sum(1).tolist() == GIVEN["mask"].sum(1).tolist()


def test_rows_are_as_long_as_the_longest_rollout() -> None:
    config = replace(config_of({}), data=replace(config_of({}).data, seq_length=1000))
    rollouts = rollouts_of_golden()
    assert trim_rows(config, rollouts).data.seq_length == 64
    rollouts.bounds[2, 1] = 65
    assert trim_rows(config, rollouts).data.seq_length == 128
    overlapped = replace(config, model=replace(config.model, tp_comm_overlap=True))
    assert trim_rows(overlapped, rollouts) is overlapped
    (batch,) = step_batches(config_of({}), rollouts_of_golden(), torch.arange(ROWS), 0)
    assert {tuple(t.shape) for t in batch.values()} == {(ROWS, LENGTH)}


def scores_of_shards(rank: int, world: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probabilities, entropies and the gradient of this rank's columns."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(2, 5, 12, generator=generator)
    labels = torch.randint(0, 11, (2, 5), generator=generator)
    logits[..., 11:] = float("-inf")
    mine = logits.chunk(world, -1)[rank].clone() if world > 1 else logits[..., :11].clone()
    mine.requires_grad_()
    group = torch.distributed.group.WORLD if world > 1 else one_rank()
    assert group is not None
    found = score_labels(mine, labels, group, temperature=0.7, entropy_has_gradient=True)
    (found.log_probs * torch.arange(5) + found.entropy**2).sum().backward()
    assert mine.grad is not None
    return found.log_probs.detach(), found.entropy.detach(), mine.grad


def test_scores_of_a_sharded_vocabulary_are_those_of_one_rank() -> None:
    log_probs, entropy, gradient = scores_of_shards(0, 1)
    exact = torch.distributions.Categorical(
        logits=torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(1))[..., :11] / 0.7
    )
    torch.testing.assert_close(entropy, exact.entropy())
    ranks = run_ranks(scores_of_shards, 2)
    for found, of_entropy, _ in ranks:
        torch.testing.assert_close(found, log_probs)
        torch.testing.assert_close(of_entropy, entropy)
    joined = torch.cat([shard for _, _, shard in ranks], -1)[..., :11]
    torch.testing.assert_close(joined, gradient)

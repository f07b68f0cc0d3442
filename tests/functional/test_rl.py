"""pretrain_rl.py: rewards rise, in every layout, and a run goes on after a kill."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megatron.core.inference.paged_engine.options import EngineOptions
from megatron.core.inference.refit import Refit
from megatron.post_training.rl import trainer
from megatron.post_training.rl.generate import generate_round
from megatron.post_training.rl.trainer import rollout_options
from megatron.training.config.run import RunConfig
from tests.support import selection
from tests.support.ranks import run_ranks
from tests.support.rl_environments import Echo
from tests.support.rl_runs import ECHO as ECHO_ENVIRONMENT
from tests.support.rl_runs import TINY, numbers, refusal_of_rl, run_rl, train_rl

LAYOUTS: dict[str, tuple[int, str]] = {
    "tp2 sp": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "tp2 to tp1": (
        2,
        "--tensor-model-parallel-size 2 --rl-inference-tensor-model-parallel-size 1",
    ),
    "pp2": (2, "--pipeline-model-parallel-size 2"),
    "cp2": (2, "--context-parallel-size 2"),
    "dp2 zero1": (2, "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"),
    "tp2 pp2": (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"),
    "virtual stages": (
        2,
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --num-layers 4",
    ),
}
ECHO = "tests.support.rl_environments:Echo"
ROUNDED = {"grad-norm", "sampling difference"}


def compare(found: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    """Compare the metrics of two layouts; the rollouts must be equal."""
    for line, other in zip(numbers(found), numbers(wanted), strict=True):
        assert line.keys() == other.keys()
        assert line["sampling difference"] < 1e-5, "the engine has other weights"
        for key, value in line.items():
            if key not in ROUNDED and isinstance(value, float):
                assert value == pytest.approx(other[key], abs=2e-5), (line["iteration"], key)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The metrics of six steps on one rank, without further flags."""
    return run_rl(tmp_path_factory.mktemp("plain"))


@pytest.mark.feature("RL: GRPO with rollouts by the engine of the run raises the reward")
def test_the_reward_rises(tmp_path: Path) -> None:
    flags = "--train-iters 30 --lr 1e-2 --min-lr 1e-2 --micro-batch-size 16 --global-batch-size 64"
    environment = {"agent_type": ECHO, "agent_args": {"count": 4}}
    metrics = run_rl(tmp_path, *flags.split(), "--grpo-group-size", "16", env=[environment])
    rewards = [line["reward"] for line in metrics]
    assert sum(rewards[:3]) / 3 < 0.2
    assert sum(rewards[-3:]) / 3 > 0.8


ECHO_FUNCTION = """
def reward(prompt, answer):
    words = answer.split()
    return sum(word == prompt["prompt"].split()[-1] for word in words) / max(len(words), 1)
"""


def test_a_function_of_a_file_trains_as_the_environment_that_it_replaces(
    plain: list[dict[str, Any]], tmp_path: Path
) -> None:
    (tmp_path / "rewards.py").write_text(ECHO_FUNCTION)
    rows = [{"prompt": prompt} for prompt in Echo().prompts]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = {
        "functions": f"{tmp_path}/rewards.py:reward",
        "prompts": f"{tmp_path}/prompts.jsonl",
    }
    entry = {"agent_type": "functions", "agent_args": arguments}
    found = run_rl(tmp_path / "function", env=[entry])
    assert numbers(found) == numbers(plain)


DEFAULT = (
    "tp2 sp",
    "pp2",
    "virtual stages",
)  # of `make test`


@pytest.mark.feature("RL: GRPO computes the same in every layout")
@pytest.mark.parametrize("name", selection.only(DEFAULT, LAYOUTS))
def test_layouts_train_alike(name: str, plain: list[dict[str, Any]], tmp_path: Path) -> None:
    world_size, flags = LAYOUTS[name]
    words = flags.split()
    alone = plain
    if "--num-layers" in words:
        alone = run_rl(tmp_path / "alone", *words[words.index("--num-layers") :])
    found = run_rl(tmp_path / "layout", *words, world_size=world_size)
    compare(found, alone)


@pytest.mark.feature("RL: with --batch-invariant-mode training has the bits of the rollouts")
def test_log_probabilities_are_those_of_rollouts_bit_for_bit(
    plain: list[dict[str, Any]], tmp_path: Path
) -> None:
    layout = "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2"
    rollouts = (
        "--rl-inference-tensor-model-parallel-size 4 --rl-inference-pipeline-model-parallel-size 1"
    )
    words = [*layout.split(), *rollouts.split(), "--batch-invariant-mode", "--bf16"]
    found = run_rl(tmp_path, *words, "--train-iters", "2", world_size=4)
    assert [line["sampling difference"] for line in found] == [0, 0]
    assert any(line["sampling difference"] > 0 for line in plain)


def test_padding_changes_nothing(plain: list[dict[str, Any]], tmp_path: Path) -> None:
    flags = ["--seq-length", "100", "--max-position-embeddings", "100"]
    compare(run_rl(tmp_path / "long", *flags), plain)


def test_experts_train_alike_with_and_without_padding(tmp_path: Path) -> None:
    experts = "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.1".split()
    alone = run_rl(tmp_path / "alone", *experts)
    flags = "--seq-length 100 --max-position-embeddings 100 --expert-model-parallel-size 2"
    found = run_rl(tmp_path / "layout", *experts, *flags.split(), world_size=2)
    assert "load_balancing_loss" in alone[0]
    compare(found, alone)


def train_with_int8_rollouts(rank: int, world_size: int, argv: list[str]) -> None:
    def options(config: RunConfig) -> EngineOptions:
        return replace(rollout_options(config), weights="int8")

    with mock.patch.object(trainer, "rollout_options", options):
        train_rl(rank, world_size, argv)


REPLAY = (
    "--num-experts 64 --moe-router-topk 4 --disable-bias-linear "
    "--moe-ffn-hidden-size 16 --moe-layer-freq [0,1] --grpo-iterations 2 "
    "--train-iters 2 --init-method-std 0.3 --moe-enable-routing-replay"
).split()
REPLAY_LAYOUTS = {
    "tp2 sp pp2, recomputed": (
        4,
        "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 "
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
        "--rl-inference-tensor-model-parallel-size 1 --rl-inference-pipeline-model-parallel-size 1",
    ),
    "cp2 ep2": (
        2,
        "--context-parallel-size 2 --expert-model-parallel-size 2 "
        "--rl-inference-pipeline-model-parallel-size 2 --rl-inference-expert-model-parallel-size 1",
    ),
}


@pytest.mark.feature("RL: --moe-enable-routing-replay trains on the experts of the rollouts")
def test_experts_of_rollouts_are_replayed_in_every_layout(
    tmp_path: Path,
) -> None:
    runs = {"replayed": (1, ""), **REPLAY_LAYOUTS, "free": (1, "")}
    found = {}
    for name, (world_size, flags) in runs.items():
        words = [*REPLAY, *flags.split()]
        if name == "free":
            words.remove("--moe-enable-routing-replay")
        found[name] = run_rl(
            tmp_path / name, *words, world_size=world_size, program=train_with_int8_rollouts
        )
    wanted = found["replayed"]
    differences = [sum(line["sampling difference"] for line in lines) for lines in found.values()]
    assert differences[0] < 0.8 * differences[-1]
    assert differences[:-1] == pytest.approx([differences[0]] * 3, rel=1e-2)
    for name in REPLAY_LAYOUTS:
        for line, other in zip(numbers(found[name]), numbers(wanted), strict=True):
            for key in ("grpo loss", "grad-norm", "entropy", "reward"):
                assert line[key] == pytest.approx(other[key], rel=1e-3, abs=2e-5), (name, key)


@pytest.mark.feature("RL: a run goes on inside of a round with the same numbers")
def test_a_resumed_run_has_the_same_numbers(tmp_path: Path) -> None:
    flags = ["--grpo-iterations", "2", "--train-iters", "6"]
    whole = run_rl(tmp_path / "whole", *flags)
    for step in (3, 4):  # inside of a round, and after one
        folder = tmp_path / str(step)
        save = ["--save", str(folder / "saved"), "--load", str(folder / "saved")]
        first = run_rl(folder / "first", *flags, *save, "--exit-interval", str(step))
        assert numbers(first) == numbers(whole)[:step]
        rest = run_rl(folder / "rest", *flags, *save)
        assert [line["iteration"] for line in rest] == list(range(step + 1, 7))
        assert numbers(rest) == numbers(whole)[step:]


def test_a_run_goes_on_in_another_layout(plain: list[dict[str, Any]], tmp_path: Path) -> None:
    save = ["--save", str(tmp_path / "saved"), "--load", str(tmp_path / "saved")]
    run_rl(tmp_path / "first", *save, "--exit-interval", "3")
    tensor = ["--tensor-model-parallel-size", "2"]
    compare(run_rl(tmp_path / "rest", *save, *tensor, world_size=2), plain[3:])


def test_a_run_that_was_killed_in_rollouts_goes_on_with_the_same_numbers(
    plain: list[dict[str, Any]], tmp_path: Path
) -> None:
    save = ["--save", str(tmp_path / "saved"), "--load", str(tmp_path / "saved")]
    flags = ["--save-interval", "1"]
    killer = {
        "agent_type": "tests.support.rl_environments:Dying",
        "agent_args": {"calls": 40, "marker": str(tmp_path / "marker")},
    }
    with pytest.raises(Exception, match="9"):  # killed in the third round of 16 answers
        run_rl(tmp_path / "killed", *flags, *save, env=[killer])
    rest = run_rl(tmp_path / "rest", *flags, *save, env=[killer])
    assert [line["iteration"] for line in rest] == [5, 6]
    assert numbers(rest) == numbers(plain)[4:]


@pytest.mark.feature("RL: evaluations on held-out prompts")
def test_evaluations_change_nothing_and_are_the_same_in_every_layout(
    plain: list[dict[str, Any]], tmp_path: Path
) -> None:
    held_out = {"agent_type": ECHO, "agent_args": {"count": 7}, "evaluation_only": True}
    env = [{"agent_type": ECHO}, held_out]
    flags = "--eval-iters 1 --eval-interval 2 --rl-prompts-per-eval 5 --train-iters 4".split()
    found = run_rl(tmp_path / "evaluated", *flags, env=env)
    steps = [line for line in found if line["kind"] == "step"]
    assert numbers(steps) == numbers(plain)[:4]
    keys = [f"{name} validation" for name in ("reward", "response length", "unfinished responses")]
    evaluated = [[line[key] for key in keys] for line in found if line["kind"] == "validation"]
    assert len(evaluated) == 2
    assert all(0 <= values[0] <= 1 and 1 <= values[1] <= 4 for values in evaluated)
    assert not any("ppl" in key for line in found for key in line)
    layout = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2".split()
    other = run_rl(tmp_path / "layout", *flags, *layout, env=env, world_size=4)
    other = [[line[key] for key in keys] for line in other if line["kind"] == "validation"]
    assert other == evaluated


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the weights after two steps."""
    folder = tmp_path_factory.mktemp("pretrained")
    run_rl(folder, "--train-iters", "2", "--save", str(folder / "saved"))
    return folder / "saved"


def test_the_kl_term_begins_at_zero_and_is_the_same_in_every_layout(
    pretrained: Path, tmp_path: Path
) -> None:
    flags = ["--pretrained-checkpoint", str(pretrained), "--grpo-kl-beta", "0.5"]
    save = ["--save", str(tmp_path / "saved")]
    alone = run_rl(tmp_path / "alone", *flags, *save, "--exit-interval", "3")
    assert alone[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert alone[-1]["kl"] > 1e-4
    layout = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
    found = run_rl(tmp_path / "layout", *flags, *layout.split(), world_size=4)
    compare(found[:3], alone)
    load = ["--load", str(tmp_path / "saved")]
    rest = run_rl(tmp_path / "rest", *flags, *load)
    compare(rest, found[3:])
    lines = run_rl(tmp_path / "zero", *flags, "--use-distributed-optimizer", world_size=2)
    compare(lines[:3], alone)


@pytest.mark.feature("RL: the reference policy is the loaded model unless another one is named")
def test_the_loaded_model_is_the_reference_policy_also_after_a_resume(
    pretrained: Path, tmp_path: Path
) -> None:
    flags = ["--load", str(pretrained), "--finetune", "--grpo-kl-beta", "0.5"]
    named = run_rl(tmp_path / "named", *flags, "--pretrained-checkpoint", str(pretrained))
    save = ["--save", str(tmp_path / "saved"), "--exit-interval", "3"]
    first = run_rl(tmp_path / "first", *flags, *save)
    rest = run_rl(tmp_path / "rest", "--load", str(tmp_path / "saved"), "--grpo-kl-beta", "0.5")
    compare([*first, *rest], named)
    pretrained.rename(tmp_path / "moved")
    moved = ["--load", str(tmp_path / "saved"), "--grpo-kl-beta", "0.5"]
    message = refusal_of_rl(tmp_path / "gone", *moved)
    (tmp_path / "moved").rename(pretrained)
    assert "its reference policy, are gone: restore them, or give a copy with" in message
    new = str(tmp_path / "new")
    message = refusal_of_rl(tmp_path / "new_run", "--load", new, "--save", new, *flags[-2:])
    assert "holds no checkpoint yet, and --grpo-kl-beta needs a reference policy" in message


def test_another_reference_policy_is_refused(pretrained: Path, tmp_path: Path) -> None:
    save = ["--save", str(tmp_path / "saved"), "--train-iters", "2"]
    flags = ["--pretrained-checkpoint", str(pretrained), "--grpo-kl-beta", "0.5"]
    run_rl(tmp_path / "a", *flags, *save)
    flags[1] = str(tmp_path / "saved")
    load = ["--load", str(tmp_path / "saved"), "--train-iters", "4"]
    message = "its weights are not those of the reference policy"
    assert message in refusal_of_rl(tmp_path / "b", *flags, *load)


def count_verified(rank: int, world_size: int, argv: list[str]) -> list[int]:
    """Train; return how many parameters had equal hashes in each round."""
    counts = []

    def verify(refit: Refit) -> int:
        counts.append(plain_verify(refit))
        return counts[-1]

    plain_verify = Refit.verify
    with mock.patch.object(Refit, "verify", verify):
        train_rl(rank, world_size, argv)
    return counts


@pytest.mark.feature("RL: hashes prove that the engine has the weights of training")
@pytest.mark.parametrize("sharding", ["--use-distributed-optimizer", "--use-torch-fsdp2"])
def test_the_engine_has_the_weights_of_training(sharding: str, tmp_path: Path) -> None:
    environments = tmp_path / "environments.yaml"
    environments.write_text(json.dumps(ECHO_ENVIRONMENT))
    flags = (
        f"{sharding} --tensor-model-parallel-size 2 --rl-inference-tensor-model-parallel-size 1 "
        "--rl-inference-pipeline-model-parallel-size 2 --rl-verify-model-weights-swap --bf16 "
        "--train-iters 3 --no-gradient-accumulation-fusion"
    )
    argv = [*TINY, "--langrl-env-config", str(environments), *flags.split()]
    for counts in run_ranks(count_verified, 4, argv):
        assert len(counts) == 2
        assert min(counts) > 20


@pytest.mark.feature("RL: adapters are trained with their base as the reference policy")
def test_adapters_train_alike_in_every_layout(pretrained: Path, tmp_path: Path) -> None:
    adapters = "--lora-rank 4 --lora-target-modules all-linear word_embeddings"
    flags = f"--load {pretrained} {adapters} --grpo-kl-beta 0.1 --lr 0.05 --min-lr 0.05".split()
    save = ["--save", str(tmp_path / "saved"), "--exit-interval", "3"]
    first = run_rl(tmp_path / "first", *flags, *save)
    assert first[0]["kl"] == 0
    assert first[-1]["kl"] > 1e-3
    assert max(line["sampling difference"] for line in first) < 1e-5
    layout = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
    found = run_rl(tmp_path / "layout", *flags, *layout.split(), world_size=4)
    compare(found[:3], first)
    rest = ["--load", str(tmp_path / "saved"), *flags[2:], "--use-distributed-optimizer"]
    compare(run_rl(tmp_path / "rest", *rest, world_size=2), found[3:])


def answers_ahead(rank: int, world_size: int, argv: list[str]) -> list[list[tuple[int, bool]]]:
    """Return length and end of the answers of later rounds, after each round of a run."""
    found = []

    def generate(*arguments: Any) -> Any:
        rollouts, ahead = generate_round(*arguments)
        found.append([(len(answer["tokens"]), answer["is_done"]) for answer in ahead.values()])
        return rollouts, ahead

    with mock.patch.object(trainer, "generate_round", generate):
        train_rl(rank, world_size, argv)
    return found


PARTIAL = "--rl-partial-rollouts --rl-max-inflight-requests 6".split()


@pytest.mark.feature("RL: answers of later rounds go on over updates of the weights")
def test_answers_go_on_with_the_weights_of_the_next_round(
    plain: list[dict[str, Any]], tmp_path: Path
) -> None:
    whole = run_rl(tmp_path / "whole", *PARTIAL, "--lr", "5e-2")
    assert max(line["sampling difference"] for line in plain) < 1e-5
    assert max(line["sampling difference"] for line in whole[2:]) > 1e-3  # of older weights
    save = ["--save", str(tmp_path / "saved"), "--load", str(tmp_path / "saved")]
    run_rl(tmp_path / "first", *PARTIAL, "--lr", "5e-2", *save, "--exit-interval", "3")
    rest = run_rl(tmp_path / "rest", *PARTIAL, "--lr", "5e-2", *save)
    assert numbers(rest) == numbers(whole)[3:]


def test_a_round_ends_with_its_own_answers(tmp_path: Path) -> None:
    environments = tmp_path / "environments.yaml"
    environments.write_text(json.dumps(ECHO_ENVIRONMENT))
    argv = [*TINY, "--langrl-env-config", str(environments), "--train-iters", "2"]
    (partial,) = run_ranks(answers_ahead, 1, [*argv, *PARTIAL])[0]
    assert len(partial) == 16
    assert (0, False) in partial  # it waits
    assert any(length and not is_done for length, is_done in partial)
    (complete,) = run_ranks(answers_ahead, 1, [*argv, "--rl-generation-lag", "0.5"])[0]
    assert len(complete) == 8
    assert all(is_done for _, is_done in complete)

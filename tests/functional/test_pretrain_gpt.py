"""The real command line, end to end: layouts, resume, kills, generation."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from unittest import mock

import pytest
import torch

from megatron.core.dist_checkpointing.reader import CheckpointReader
from megatron.training.step import evaluate
from tests.support import selection, tolerances
from tests.support.ranks import run_ranks
from tests.support.runs import ANY_LENGTH, TINY, losses, refusal, run_gpt, train_gpt

LLAMA = (
    "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    "--group-query-attention --num-query-groups 2 --untie-embeddings-and-output-weights"
).split()
BERT_SIZED_VOCAB = ["--vocab-size", "101", "--make-vocab-size-divisible-by", "8"]
SCHEDULE = ["--train-iters", "20", "--lr-warmup-iters", "3"]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of 20 steps in one process."""
    folder = tmp_path_factory.mktemp("one")
    return losses(run_gpt(folder, *SCHEDULE, *BERT_SIZED_VOCAB))


def close(actual: list[float], expected: list[float]) -> None:
    assert len(actual) == len(expected)
    torch.testing.assert_close(
        torch.tensor(actual), torch.tensor(expected), **tolerances.LAYOUT_LOSS
    )


@pytest.mark.feature("Layouts: GPT trains to the same losses under data parallelism")
def test_two_replicas_give_the_losses_of_one_process(
    tmp_path: Path, one_process: list[float]
) -> None:
    assert one_process[-1] < one_process[0] - 0.1
    close(losses(run_gpt(tmp_path, *SCHEDULE, *BERT_SIZED_VOCAB, world_size=2)), one_process)


@pytest.mark.parametrize("sequence_parallel", selection.first(1, [["--sequence-parallel"], []]))
@pytest.mark.feature("Layouts: GPT trains to the same losses under tensor and sequence parallelism")
def test_two_tensor_ranks_give_the_losses_of_one_process(
    tmp_path: Path, one_process: list[float], sequence_parallel: list[str]
) -> None:
    flags = [*SCHEDULE, *BERT_SIZED_VOCAB, "--tensor-model-parallel-size", "2"]
    close(losses(run_gpt(tmp_path, *flags, *sequence_parallel, world_size=2)), one_process)


def test_a_v_of_stages_gives_and_logs_the_losses_of_one_process(
    tmp_path: Path, one_process: list[float]
) -> None:
    stages = "--pipeline-schedule zb-v --pipeline-model-parallel-layout E|t|t|L".split()
    flags = [*SCHEDULE, *BERT_SIZED_VOCAB, "--pipeline-model-parallel-size", "2"]
    close(losses(run_gpt(tmp_path, *flags, *stages, world_size=2)), one_process)


@pytest.mark.parametrize(
    "layout", selection.only(["per-token", "zero"], ["overlap", "per-token", "bucketed", "zero"])
)
def test_llama_shapes_in_four_ranks_give_the_losses_of_one_process(
    tmp_path: Path, layout: str
) -> None:
    flags = {
        "overlap": ["--overlap-grad-reduce", "--sequence-parallel"],
        "per-token": ["--calculate-per-token-loss"],
        "bucketed": ["--overlap-grad-reduce", "--ddp-bucket-size", "1000"],
        "zero": [
            *("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"),
            *("--ddp-bucket-size", "1000"),
        ],
    }[layout]
    alone = losses(run_gpt(tmp_path / "1", *LLAMA, *[f for f in flags if "parallel" not in f]))
    four = losses(
        run_gpt(tmp_path / "4", *LLAMA, *flags, "--tensor-model-parallel-size", "2", world_size=4)
    )
    close(four, alone)


def state_of(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint."""
    with CheckpointReader(folder) as reader:
        return {key: reader.read(key) for key in reader.tensors}


@pytest.mark.parametrize(
    "precision", selection.first(2, [[], ["--fp16", "--initial-loss-scale", "1024"], ["--bf16"]])
)
@pytest.mark.feature("Checkpoints: a resumed run repeats the whole one bit for bit on the CPU")
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path, precision: list[str]) -> None:
    dropout = ["--hidden-dropout", "0.1", "--attention-dropout", "0.1"]
    ramp = ["--rampup-batch-size", "4", "4", "12", "--train-samples", "64"]
    base = ANY_LENGTH
    flags = [*dropout, *ramp, *precision, "--log-params-norm", "--log-num-zeros-in-grad"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    save = ["--save-interval", "100", "--save"]
    expected = run_gpt(whole, *flags, *save, str(whole / "ck"), base=base)
    first = run_gpt(parts, *flags, *save, str(parts / "ck"), "--exit-interval", "4", base=base)
    rest = run_gpt(parts, *flags, *save, str(parts / "ck"), "--load", str(parts / "ck"), base=base)
    assert len(first) == 4
    numbers = [steps(lines) for lines in (expected, rest)]
    assert numbers[0] == numbers[1]  # the file goes on where the first part ended
    name = Path((whole / "ck" / "latest_checkpointed_iteration.txt").read_text())
    end = f"iter_{int(str(name)):07d}"
    one, other = state_of(whole / "ck" / end), state_of(parts / "ck" / end)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)


def steps(lines: list[dict[str, object]]) -> list[dict[str, object]]:
    """What a step logged, without times and rates."""
    kept = ("iteration", "consumed_samples", "lm loss", "learning-rate", "grad-norm", "params-norm",
            "num-zeros", "loss-scale", "batch-size")  # fmt: skip
    return [{k: line[k] for k in kept if k in line} for line in lines if line["kind"] == "step"]


@pytest.mark.feature("Checkpoints: a run killed at any moment resumes to the same numbers")
@pytest.mark.parametrize("fault", ["step.before:kill:step3", "save.before:kill:step4"])
def test_a_killed_run_resumes_to_the_same_numbers(tmp_path: Path, fault: str) -> None:
    straight = steps(run_gpt(tmp_path / "straight"))
    folder = tmp_path / "killed"
    flags = ["--save", str(folder / "ck"), "--load", str(folder / "ck"), "--save-interval", "2"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAULTS", fault)
        with pytest.raises(AssertionError, match="SIGKILL"):
            run_gpt(folder, *flags)
    assert steps(run_gpt(folder, *flags)) == straight


def _signalled_in_evaluation(rank: int, world_size: int, argv: list[str]) -> None:
    def signal_last_rank(point: str, *, step: int) -> None:
        if rank == world_size - 1:
            os.kill(os.getpid(), signal.SIGTERM)

    with mock.patch.object(evaluate, "fault_point", signal_last_rank):
        train_gpt(rank, world_size, argv)


@pytest.mark.feature("Running: SIGTERM to one rank ends all of them with a checkpoint")
def test_a_signal_in_a_long_evaluation_saves_and_ends_the_run(tmp_path: Path) -> None:
    flags = ["--exit-signal-handler", "--save", str(tmp_path / "ck"), "--eval-interval", "2"]
    argv = [*TINY, *flags, "--eval-iters", "1000000"]
    run_ranks(_signalled_in_evaluation, 2, argv)
    assert (tmp_path / "ck" / "latest_checkpointed_iteration.txt").read_text() == "2"


def generate(rank: int, world_size: int, load: str, prompt: str) -> list[tuple[str, list[int]]]:
    from megatron.core.inference.sampling_params import SamplingParams
    from megatron.inference import LLM

    params = SamplingParams(temperature=0.0, num_tokens_to_generate=8)
    answers = LLM.load(load, device_kind="cpu").generate(prompt, params)
    return [(answer.text, [t.token for t in answer.tokens]) for answer in answers]


@pytest.mark.feature("Generation: text from a training checkpoint with nothing but its directory")
def test_one_process_writes_what_two_tensor_ranks_write(tmp_path: Path) -> None:
    save = ["--save", str(tmp_path / "ck"), "--save-interval", "4"]
    run_gpt(tmp_path, *save, *LLAMA, "--tensor-model-parallel-size", "2", world_size=2)
    ((alone,),) = run_ranks(generate, 1, str(tmp_path / "ck"), "1 2 3")
    two = run_ranks(generate, 2, str(tmp_path / "ck"), "1 2 3")
    assert len(alone[1]) == 8
    assert two == [[alone], []]


def test_the_resolved_configuration_alone_starts_the_same_run(tmp_path: Path) -> None:
    first = run_gpt(tmp_path / "a", "--save", str(tmp_path / "ck"), "--save-interval", "4")
    config = tmp_path / "ck" / "iter_0000004" / "config.yaml"
    json.loads(config.read_text())  # JSON is YAML that needs no package
    flags = ["--yaml-cfg", str(config), "--save", str(tmp_path / "ck2")]
    again = run_gpt(tmp_path / "b", *flags, base=[])
    assert steps(again) == steps(first)


def test_a_finished_run_that_is_started_again_evaluates_and_ends_in_order(tmp_path: Path) -> None:
    flags = ["--save", str(tmp_path / "ck"), "--load", str(tmp_path / "ck")]
    first = run_gpt(tmp_path, *flags)
    again = run_gpt(tmp_path, *flags)
    without_time = [[{**line, "time": 0} for line in lines] for lines in (first, again)]
    assert without_time[0] == without_time[1]


def test_an_old_checkpoint_that_cannot_be_deleted_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAULTS", "save.before_delete:enospc:step4")
    flags = ["--save-interval", "2", "--save-retain-interval", "100", "--train-iters", "6"]
    run_gpt(tmp_path, "--save", str(tmp_path / "ck"), *flags)
    kept = sorted(path.name for path in (tmp_path / "ck").glob("iter_*"))
    assert kept == ["iter_0000002", "iter_0000006"]


def test_a_resumed_run_with_larger_batches_takes_all_samples(tmp_path: Path) -> None:
    save = ["--save", str(tmp_path / "ck"), "--load", str(tmp_path / "ck")]
    base = ANY_LENGTH
    samples = ["--train-samples", "64"]
    run_gpt(tmp_path, *samples, *save, "--exit-interval", "2", base=base)
    lines = run_gpt(tmp_path, *samples, *save, "--global-batch-size", "16", base=base)
    consumed = [line["consumed_samples"] for line in lines if line["kind"] == "step"]
    assert consumed == [8, 16, 32, 48, 64]


def test_a_resumed_run_by_steps_has_data_for_other_batch_sizes(tmp_path: Path) -> None:
    save = ["--save", str(tmp_path / "ck"), "--load", str(tmp_path / "ck")]
    run_gpt(tmp_path, *save, "--exit-interval", "3")
    smaller = ["--global-batch-size", "2", "--override-opt_param-scheduler"]
    lines = run_gpt(tmp_path, *save, *smaller)
    assert [line["consumed_samples"] for line in lines if line["kind"] == "step"][-1] == 26


@pytest.mark.feature("Running: a batch that does not divide evenly is decreased on request")
def test_a_decreased_batch_keeps_schedule_and_data_of_the_full_one(tmp_path: Path) -> None:
    save = ["--save", str(tmp_path / "ck"), "--load", str(tmp_path / "ck")]
    flags = ["--micro-batch-size", "3", "--decrease-batch-size-if-needed", *save]
    lines = run_gpt(tmp_path, *flags, "--exit-interval", "3")
    assert [line["consumed_samples"] for line in lines] == [6, 12, 18]
    assert [line["skipped-train-samples"] for line in lines] == [2, 4, 6]
    # micro-batches that divide the batch: the same schedule, so that the checkpoint fits
    assert run_gpt(tmp_path, *save)[3]["consumed_samples"] == 26


def test_load_that_names_nothing_ends_the_run(tmp_path: Path) -> None:
    (said,) = run_ranks(refusal, 1, [*TINY, "--load", str(tmp_path / "nothing")])
    assert "nothing holds no checkpoint: correct the path" in said


def test_skipped_iterations_take_their_data_and_run_nothing(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAULTS", "step.gradient:nan:step2,step.gradient:nan:step4")
        lines = steps(run_gpt(tmp_path, "--iterations-to-skip", "2", "4"))
    assert [line["consumed_samples"] for line in lines] == [8, 16, 24, 32]
    assert ["lm loss" in line for line in lines] == [True, False, True, False]
    rates = [line["learning-rate"] for line in lines]
    assert rates[1] == rates[0], "the schedule stands still"


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_nan_in_a_gradient_names_step_and_rank(
    tmp_path: Path, world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    culprit = world_size - 1
    monkeypatch.setenv("FAULTS", f"step.gradient:nan:step3:rank{culprit}")
    expected = f"rank {culprit} has a NaN or infinite gradient in"
    if world_size == 1:
        (said,) = run_ranks(refusal, 1, TINY)
        assert expected in said
        assert "step 3: rank 0: found NaN or Inf in the global gradient norm" in said
        assert "the step was computed twice with this result" in said
        (said,) = run_ranks(refusal, 1, [*TINY, "--rerun-mode", "disabled"])
        assert f"step 3: {expected}" in said
        return
    stderr = tmp_path / "stderr"
    with pytest.raises(AssertionError, match="exit code 1"):
        run_ranks(_with_stderr, world_size, [*TINY], str(stderr))
    for rank in range(world_size):
        said = (tmp_path / f"stderr{rank}").read_text().splitlines()[-1]
        assert "step 3: " in said
        assert expected in said


def _with_stderr(rank: int, world_size: int, argv: list[str], stderr: str) -> None:
    os.dup2(os.open(f"{stderr}{rank}", os.O_WRONLY | os.O_CREAT), 2)
    train_gpt(rank, world_size, argv)

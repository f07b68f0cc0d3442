"""Steps that the host judges while it queues the next one, against steps that it waits for.

With --log-interval 1 the host waits for each step, because the log line needs its result.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megatron.training import training
from megatron.training.callbacks import Callback, Runtime, StepResult, register_metric
from megatron.training.callbacks.default import default_callbacks
from megatron.training.runtime.runtime import CallbackList
from tests.functional.runs import TINY, train_gpt, without_times
from tests.functional.test_reruns import DEFERRED, train
from tests.ranks import run_ranks

NAN_IN_STEP_3 = "step.gradient:nan:step3:times1"
ADAPTED = "--fp16 --initial-loss-scale 4096 --hysteresis 1 --loss-scale-window 2"
UNCHECKED = "--no-check-for-nan-in-loss-and-grad"


def _metrics(folder: Path, *flags: str, faults: str = "", ranks: int = 1) -> list[dict[str, Any]]:
    codes, said, _ = train(folder, *flags, world_size=ranks, faults=faults)
    assert codes == {0}, said
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == "step"]


@pytest.mark.feature("Speed: a step that is judged later has the same bits")
@pytest.mark.parametrize(
    ("ranks", "flags", "faults", "skipped"),
    [
        (1, "--bf16", "", []),
        (1, ADAPTED, NAN_IN_STEP_3, [3]),
        (2, f"{ADAPTED} --pipeline-model-parallel-size 2", f"{NAN_IN_STEP_3}:rank1", [3]),
        (1, UNCHECKED, NAN_IN_STEP_3, [3]),
        (1, f"{UNCHECKED} --rerun-mode disabled", NAN_IN_STEP_3, [3]),
        (1, f"{UNCHECKED} --iterations-to-skip 2 4", NAN_IN_STEP_3, [2, 3, 4]),
        (2, "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather", "", []),
    ],
)
def test_values_do_not_depend_on_when_the_host_reads_them(
    tmp_path: Path, ranks: int, flags: str, faults: str, skipped: list[int]
) -> None:
    words = [*flags.split(), "--lr-warmup-iters", "4"]
    waited = _metrics(tmp_path / "a", *words, faults=faults, ranks=ranks)
    found = _metrics(
        tmp_path / "b", *words, *"--log-interval 6".split(), faults=faults, ranks=ranks
    )
    assert without_times(found) == without_times(waited)
    assert [line["iteration"] for line in found if "grad-norm" not in line] == skipped
    # The learning rate changes after every step with an update.
    rates = [line["learning-rate"] for line in found]
    still = [n for n in range(2, 7) if rates[n - 1] == rates[n - 2]]
    assert still == [n for n in skipped if n > 1]
    last = found[-1]["interval"]
    assert last["number of skipped iterations"] == len(skipped)
    assert last["lm loss"] == pytest.approx(_mean(found, skipped), rel=1e-6)


def _mean(lines: list[dict[str, Any]], skipped: list[int]) -> float:
    losses = [line["lm loss"] for line in lines if line["iteration"] not in skipped]
    return sum(losses) / len(losses)


@pytest.mark.parametrize("flags", ["", DEFERRED, f"{DEFERRED} --rerun-mode disabled"])
def test_a_loss_that_is_not_finite_ends_the_run_with_the_number_of_its_step(
    tmp_path: Path, flags: str
) -> None:
    codes, said, values = train(tmp_path, "--lr", "1e30", *flags.split())
    assert codes == {1}
    assert "step 2: rank 0: found NaN in local forward loss calculation of micro-batch 0" in said
    assert list(values) == [1]


@pytest.mark.parametrize("step", [3, 6])  # 6: the last one
def test_a_rejected_step_is_in_no_checkpoint(tmp_path: Path, step: int) -> None:
    folder = tmp_path / "c"
    flags = ["--save", str(folder), "--save-interval", "4", *DEFERRED.split()]
    codes, said, values = train(tmp_path, *flags, faults=f"step.gradient:nan:step{step}")
    assert codes == {16}
    assert f"step {step}: " in said
    assert list(values) == [*range(1, step)]
    assert (folder / "latest_checkpointed_iteration.txt").read_text() == str(step - 1)
    saved = {path.name for path in folder.iterdir() if path.name.startswith("iter_")}
    assert saved == {f"iter_{n:07d}" for n in ({2} if step == 3 else {4, 5})}


class EveryThirdStep(Callback):
    """A callback that reads every third result."""

    def needs_result(self, run: Runtime, iteration: int) -> bool:
        return iteration % 3 == 0

    def on_step_end(self, run: Runtime, result: StepResult) -> None: ...


def _with_part_on_rank_1(rank: int, world_size: int, argv: list[str], part: str) -> None:
    def callbacks(run: Runtime) -> CallbackList:
        found = default_callbacks(run)
        if rank == 1 and part == "callback":
            found.append(EveryThirdStep())
        return found

    if rank == 1 and part == "metric":
        register_metric("of-this-test", lambda run, result: {})
    with mock.patch.object(training, "default_callbacks", callbacks):
        train_gpt(rank, world_size, argv)


@pytest.mark.parametrize("part", ["callback", "metric"])
def test_all_ranks_judge_a_step_together_if_one_has_a_part_of_a_user(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAULTS", f"{NAN_IN_STEP_3}:rank0")
    run_ranks(_with_part_on_rank_1, 2, [*TINY, *DEFERRED.split()], part)


def test_a_run_that_resumes_has_the_values_of_one_that_does_not(tmp_path: Path) -> None:
    save = ["--save", str(tmp_path / "c"), "--load", str(tmp_path / "c"), *DEFERRED.split()]
    undisturbed = train(tmp_path / "a")[2]
    first = train(tmp_path / "b", *save, "--exit-interval", "3")[2]
    second = train(tmp_path / "b", *save)[2]
    assert first | second == undisturbed
    assert list(second) == [4, 5, 6]

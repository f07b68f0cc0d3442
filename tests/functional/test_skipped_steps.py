"""Steps without an update (skipped, rejected): values, logs and checkpoints of the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.functional.test_reruns import train
from tests.support import selection
from tests.support.runs import without_times

NAN_IN_STEP_3 = "step.gradient:nan:step3:times1"
ADAPTED = "--fp16 --initial-loss-scale 4096 --hysteresis 1 --loss-scale-window 2"
UNCHECKED = "--no-check-for-nan-in-loss-and-grad"


def _metrics(folder: Path, *flags: str, faults: str = "", ranks: int = 1) -> list[dict[str, Any]]:
    codes, said, _ = train(folder, *flags, world_size=ranks, faults=faults)
    assert codes == {0}, said
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == "step"]


@pytest.mark.parametrize(
    ("ranks", "flags", "faults", "skipped"),
    selection.first(
        4,
        [
            (2, f"{ADAPTED} --pipeline-model-parallel-size 2", f"{NAN_IN_STEP_3}:rank1", [3]),
            (1, UNCHECKED, NAN_IN_STEP_3, [3]),
            (1, f"{UNCHECKED} --iterations-to-skip 2 4", NAN_IN_STEP_3, [2, 3, 4]),
            (2, "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather", "", []),
            (1, "--bf16", "", []),
            (1, ADAPTED, NAN_IN_STEP_3, [3]),
            (1, f"{UNCHECKED} --rerun-mode disabled", NAN_IN_STEP_3, [3]),
        ],
    ),
)
def test_values_do_not_depend_on_the_log_interval(
    tmp_path: Path, ranks: int, flags: str, faults: str, skipped: list[int]
) -> None:
    words = [*flags.split(), "--lr-warmup-iters", "4"]
    each = _metrics(tmp_path / "a", *words, faults=faults, ranks=ranks)
    found = _metrics(
        tmp_path / "b", *words, *"--log-interval 6".split(), faults=faults, ranks=ranks
    )
    assert without_times(found) == without_times(each)
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


@pytest.mark.parametrize("flags", ["", "--log-interval 100 --rerun-mode disabled"])
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
    flags = ["--save", str(folder), "--save-interval", "4"]
    codes, said, values = train(tmp_path, *flags, faults=f"step.gradient:nan:step{step}")
    assert codes == {16}
    assert f"step {step}: " in said
    assert list(values) == [*range(1, step)]
    assert (folder / "latest_checkpointed_iteration.txt").read_text() == str(step - 1)
    saved = {path.name for path in folder.iterdir() if path.name.startswith("iter_")}
    assert saved == {f"iter_{n:07d}" for n in ({2} if step == 3 else {4, 5})}

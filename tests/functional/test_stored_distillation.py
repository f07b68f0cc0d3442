"""The store of a teacher's predictions: saved in any layout, read in another, killed, refused."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megatron.post_training.distillation import stored_distillation
from megatron.post_training.distillation.logits_store import LogitsStore
from megatron.training.planning.run_plan import plan_run
from tests.support import runs, tolerances
from tests.support.command_lines import run_of
from tests.support.ranks import run_ranks
from tests.support.runs import SIX_STEPS, losses, refusal, train_gpt

run_gpt = functools.partial(runs.run_gpt, base=SIX_STEPS)
TEACHER = "--num-layers 3 --hidden-size 64 --swiglu --position-embedding-type rope".split()
KL = "logits distillation loss"
LAYOUT = (
    "--tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2 "
    "--loss-chunk-size 20"
).split()


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teacher")
    short = ["--train-iters", "2", "--eval-iters", "0", "--lr", "0.05", "--seed", "5"]
    run_gpt(folder / "run", *TEACHER, *short, "--save", str(folder / "ck"))
    return folder / "ck"


def saving(teacher: Path, store: Path, *flags: str) -> list[str]:
    """Return the command line that writes ``store``."""
    load = ["--load", str(teacher), "--finetune", "--logits-save-dir", str(store)]
    return [*SIX_STEPS, *TEACHER, *load, *flags]


@pytest.fixture(scope="module")
def store(teacher: Path) -> Path:
    """A store of all tokens in fp32."""
    folder = teacher.parent / "store"
    run_ranks(train_gpt, 1, saving(teacher, folder, "--logits-save-dtype", "fp32"))
    return folder


def all_entries(folder: Path) -> list[tuple[torch.Tensor, torch.Tensor]]:
    store = LogitsStore(str(folder))
    keys = [int(file.read("checksum")[i]) for file in store.files for i in range(len(store))]
    return [store.entries(i, keys[i]) for i in range(len(store))]


@pytest.mark.feature("Distillation: from a store of a teacher's most probable tokens")
def test_a_store_with_all_tokens_trains_like_the_teacher_itself(
    tmp_path: Path, teacher: Path, store: Path
) -> None:
    online = run_gpt(tmp_path / "a", "--export-kd-teacher-load", str(teacher))
    stored = run_gpt(tmp_path / "b", "--logits-load-dir", str(store))
    other = run_gpt(tmp_path / "c", "--logits-load-dir", str(store), *LAYOUT, world_size=4)
    for found in (stored, other):
        for key in (KL, "lm loss", "total loss"):
            wanted = torch.tensor(losses(online, key))
            torch.testing.assert_close(
                torch.tensor(losses(found, key)), wanted, **tolerances.LAYOUT_LOSS
            )
    assert not any(KL in key and "validation" in key for line in stored for key in line)


def test_another_layout_saves_the_same_store(tmp_path: Path, teacher: Path, store: Path) -> None:
    flags = ["--logits-save-dtype", "fp32", "--logits-save-top-k", "7"]
    folder = tmp_path / "store"
    layout = "--tensor-model-parallel-size 2 --context-parallel-size 2".split()
    run_ranks(train_gpt, 4, saving(teacher, folder, *flags, *layout))
    found = all_entries(folder)
    wanted = all_entries(store)
    assert len(found) == len(wanted) == 48
    for (ids, log_probs), (all_ids, every) in zip(found, wanted, strict=True):
        torch.testing.assert_close(log_probs, every[:, :7], rtol=1e-5, atol=1e-5)
        assert (ids == all_ids[:, :7]).float().mean() > 0.99  # but for ties


def test_top_p_keeps_the_tokens_that_have_this_probability_together(
    tmp_path: Path, teacher: Path, store: Path
) -> None:
    flags = ["--logits-save-top-p", "0.3", "--logits-save-top-p-min-k", "2"]
    run_ranks(train_gpt, 1, saving(teacher, tmp_path, *flags, "--logits-save-dtype", "bf16"))
    for (_, log_probs), (_, every) in zip(all_entries(tmp_path), all_entries(store), strict=True):
        is_given = log_probs > float("-inf")
        before = every.exp().cumsum(-1) - every.exp()
        expected = before < 0.3
        expected[:, :2] = True
        assert (is_given == expected).float().mean() > 0.999  # bf16 has rounded none of `every`
        close = {"rtol": 2**-8, "atol": 0.0}
        torch.testing.assert_close(log_probs[is_given], every[is_given], **close)


def killed(rank: int, world_size: int, argv: Sequence[str]) -> None:
    os.environ["FAULTS"] = "save.before_fsync:kill:step4"
    each_step(rank, world_size, argv)


def each_step(rank: int, world_size: int, argv: Sequence[str]) -> None:
    with mock.patch.object(stored_distillation, "_FILE_BYTES", 1):  # a file for each step
        train_gpt(rank, world_size, argv)


def test_a_killed_run_loses_no_file_and_the_next_one_continues(
    tmp_path: Path, teacher: Path, store: Path
) -> None:
    argv = saving(teacher, tmp_path, "--logits-save-dtype", "fp32")
    with pytest.raises(AssertionError, match="SIGKILL|-9"):
        run_ranks(killed, 1, argv)
    assert len(LogitsStore(str(tmp_path))) == 24
    times = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.safetensors")}
    run_ranks(each_step, 1, argv)
    assert all(path.stat().st_mtime_ns == time for path, time in times.items())
    store_of_both = LogitsStore(str(tmp_path))
    assert len(store_of_both) == 48
    for index in range(0, 48, 8):
        assert index in store_of_both


def said(flags: Sequence[str]) -> str:
    (complaint,) = run_ranks(refusal, 1, [*SIX_STEPS, *flags])
    return str(complaint)


def test_other_data_is_refused_with_one_message(tmp_path: Path, store: Path) -> None:
    load = ["--logits-load-dir", str(store)]
    for flags, message in (
        (["--seed", "9"], "has other tokens here: save the store with the data, the seed"),
        (["--train-iters", "9"], "the store has 48 samples and not sample 48"),
        (["--seq-length", "16"], "of the store are (32, 101), of this run (16, 101): give"),
        (["--vocab-size", "90"], "of the store are (32, 101), of this run (32, 91): give"),
    ):
        assert message in said([*load, *flags]), flags
    assert "no such file; give a folder of --logits-save-dir" in said(
        ["--logits-load-dir", str(tmp_path)]
    )


def test_a_sample_that_is_missing_may_be_trained_without(tmp_path: Path, store: Path) -> None:
    flags = ["--logits-load-dir", str(store), "--logits-load-ignore-errors"]
    found = losses(run_gpt(tmp_path, *flags, "--train-iters", "7"), KL)
    assert found[5] > 0
    assert found[6] == 0


def test_a_damaged_file_is_refused(tmp_path: Path, store: Path) -> None:
    for path in store.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (file,) = tmp_path.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)
    assert "is damaged at sample 47: save the store again" in said(
        ["--logits-load-dir", str(tmp_path)]
    )
    file.write_bytes(data[:1000])
    assert f"{file} is" in said(["--logits-load-dir", str(tmp_path)])


def test_the_weight_of_the_distance_is_that_of_the_flag(tmp_path: Path, store: Path) -> None:
    flags = ["--logits-load-dir", str(store), "--logits-load-kd-loss-alpha", "0.25"]
    (first, *_) = run_gpt(tmp_path, *flags, "--train-iters", "1")
    expected = 0.25 * first[KL] + 0.75 * first["lm loss"]
    assert abs(first["total loss"] - expected) < 1e-5


def test_a_resumed_student_goes_on_with_the_same_losses(tmp_path: Path, store: Path) -> None:
    flags = ["--logits-load-dir", str(store)]
    straight = losses(run_gpt(tmp_path / "a", *flags), KL)
    saved = ["--save", str(tmp_path / "ck"), "--save-interval", "3"]
    run_gpt(tmp_path / "b", *flags, *saved, "--exit-interval", "3")
    rest = losses(run_gpt(tmp_path / "c", *flags, "--load", str(tmp_path / "ck")), KL)
    assert rest == straight[3:]


def test_a_store_of_other_settings_is_not_mixed(tmp_path: Path, teacher: Path, store: Path) -> None:
    argv = saving(teacher, store, "--logits-save-dtype", "bf16")
    (complaint,) = run_ranks(refusal, 1, argv)
    assert "this run would save" in complaint
    assert "choose another folder" in complaint


def test_runs_with_a_store_can_be_planned(store: Path) -> None:
    size: Any = "--seq-length 32 --vocab-size 100"
    plain, taught, saves = (
        plan_run(run_of(f"{size} {flags}")).fullest.cost.state.total
        for flags in ("", f"--logits-load-dir {store}", f"--logits-save-dir {store}")
    )
    assert plain == taught == saves

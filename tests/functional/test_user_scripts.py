"""Scripts written for Megatron-LM core_v0.14 run as they are, to the losses of our programs."""

from __future__ import annotations

import copy
import json
import runpy
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megatron.training import get_args, get_tokenizer
from megatron.training.arguments import parse_args, validate_args
from megatron.training.initialize import initialize_megatron
from tests.support import selection, tolerances, user_spec
from tests.support.ranks import run_ranks
from tests.support.runs import ANY_LENGTH, ON_HOST, SIX_STEPS, losses, run_gpt, train_gpt

HERE = Path(__file__).resolve().parents[1] / "support"
DATA = HERE.parent / "golden" / "data" / "text_text_document"
TP2 = ["--tensor-model-parallel-size", "2"]


def run_script(rank: int, world_size: int, name: str, argv: Sequence[str]) -> dict[str, Any]:
    """The script as a program; what it has left in ``losses`` or ``seen``."""
    script = str(HERE / name)
    with mock.patch("sys.argv", [script, *argv]):
        names = runpy.run_path(script, run_name="__main__")
    return {key: names.get(key) for key in ("losses", "seen")}


def losses_of_script(folder: Path, *flags: str, world_size: int = 1) -> tuple[list[float], Any]:
    """Training losses of user_pretrain.py, and what its last rank has seen."""
    metrics = folder / "metrics.jsonl"
    argv = [*SIX_STEPS, *flags, "--metrics-file", str(metrics)]
    left = run_ranks(run_script, world_size, "user_pretrain.py", argv)
    return losses([*map(json.loads, metrics.read_text().splitlines())]), left[-1]


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of pretrain_gpt.py."""
    return losses(run_gpt(tmp_path_factory.mktemp("ours"), base=SIX_STEPS))


def close(actual: Sequence[float], expected: Sequence[float]) -> None:
    torch.testing.assert_close(list(actual), list(expected), **tolerances.LAYOUT_LOSS)


@pytest.mark.feature("Scripts: a pretraining script written for Megatron-LM core_v0.14 as it is")
@pytest.mark.parametrize(
    ("loss", "layout"),
    selection.first(
        3,
        [
            ("sum", TP2),
            ("mean", TP2),
            ("old-batch", []),
            ("sum", []),
            ("mean", []),
            ("old-batch", TP2),
        ],
    ),
)
def test_a_pretraining_script_gives_our_losses(
    tmp_path: Path, ours: list[float], loss: str, layout: list[str]
) -> None:
    flags = [*layout, "--my-loss", loss, "--my-switch"]
    found, left = losses_of_script(tmp_path, *flags, world_size=2 if layout else 1)
    close(found, ours)
    assert left["seen"]["num_microbatches"] == {4}
    assert left["seen"]["training"] == {True, False}  # the last evaluations come after training
    assert sorted(set(left["seen"]["iterations"])) == list(range(7))


def test_a_pretraining_script_divides_its_sequences(tmp_path: Path, ours: list[float]) -> None:
    found, _ = losses_of_script(tmp_path, "--context-parallel-size", "2", world_size=2)
    close(found, ours)


def test_flags_of_the_model_reach_a_script_on_real_data(tmp_path: Path) -> None:
    flags = ["--data-path", str(DATA), "--split", "90,5,5", "--data-cache-path", str(tmp_path)]
    flags += ["--vocab-size", "40000", "--swiglu", "--qk-layernorm"]
    flags += ["--position-embedding-type", "rope", "--normalization", "RMSNorm"]
    base = [f for f in SIX_STEPS if f != "--mock-data"]
    with mock.patch("tests.functional.test_user_scripts.SIX_STEPS", base):
        found, _ = losses_of_script(tmp_path, *flags)
    assert found == losses(run_gpt(tmp_path / "ours", *flags, *ON_HOST, base=base))


def test_what_a_loss_function_shows_besides_losses_is_handed_on(tmp_path: Path) -> None:
    flags = ["--tensorboard-dir", str(tmp_path / "tb"), "--eval-interval", "3"]
    _, left = losses_of_script(tmp_path, *flags, *TP2, world_size=2)
    # at step 3, at step 6, and on both sets at the end; four micro-batches each
    assert left["seen"]["non_loss"] == [(3, 4), (6, 4), (6, 4), (6, 4)]


def test_a_batch_that_grows_is_seen_by_scripts(tmp_path: Path) -> None:
    ramp = ["--rampup-batch-size", "4", "4", "12", "--train-samples", "32"]
    base = ANY_LENGTH
    with mock.patch("tests.functional.test_user_scripts.SIX_STEPS", base):
        _, left = losses_of_script(tmp_path, *ramp)
    assert left["seen"]["num_microbatches"] == {2, 4}


def losses_of_loop(loop: str, *flags: str, world_size: int = 1) -> list[float]:
    argv = [*SIX_STEPS, "--my-loop", loop, *flags]
    left = run_ranks(run_script, world_size, "user_train_loop.py", argv)
    assert all(part["losses"] == left[0]["losses"] for part in left)
    return left[0]["losses"]


@pytest.mark.feature("Scripts: their own train loop on initialize_megatron() and train_step()")
@pytest.mark.parametrize(
    ("loop", "layout"),
    [
        ("steps", []),
        ("bare", [*TP2, "--sequence-parallel"]),
        pytest.param("steps", TP2, marks=pytest.mark.slow),
        pytest.param("bare", [], marks=pytest.mark.slow),
    ],
)
def test_a_train_loop_of_a_script_gives_the_losses_of_pretrain_gpt(
    ours: list[float], loop: str, layout: list[str]
) -> None:
    close(losses_of_loop(loop, *layout, world_size=2 if layout else 1), ours)


def test_a_train_loop_of_a_script_logs_as_the_flags_ask(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    flags = ["--metrics-file", str(metrics), "--eval-interval", "3", "--log-params-norm"]
    found = losses_of_loop("steps", *flags, "--tensorboard-dir", str(tmp_path / "tb"))
    lines = [*map(json.loads, metrics.read_text().splitlines())]
    assert [line["lm loss"] for line in lines if line["kind"] == "step"] == found
    assert [line["iteration"] for line in lines if line["kind"] != "step"] == [3, 6]


@pytest.mark.parametrize("loop", ["steps", "bare"])
def test_a_train_loop_of_a_script_resumes_from_its_checkpoint(
    tmp_path: Path, ours: list[float], loop: str
) -> None:
    save = ["--save", str(tmp_path), "--save-interval", "3"]
    start = losses_of_loop(loop, "--my-end", "3", *save)
    rest = losses_of_loop(loop, "--load", str(tmp_path))
    assert start + rest == ours


def train_and_count(rank: int, world_size: int, argv: Sequence[str]) -> list[int]:
    user_spec.CountingLayer.built.clear()
    train_gpt(rank, world_size, argv)
    return copy.copy(user_spec.CountingLayer.built)


def losses_with_spec(folder: Path, *spec: str) -> tuple[list[float], list[int]]:
    metrics = folder / "metrics.jsonl"
    argv = [*SIX_STEPS, "--metrics-file", str(metrics), "--spec", *spec]
    (built,) = run_ranks(train_and_count, 1, argv)
    return losses([*map(json.loads, metrics.read_text().splitlines())]), built


USERS = "tests.support.user_spec"


@pytest.mark.feature("Model: layers of one's own by --spec")
@pytest.mark.parametrize("name", ["half_layer", "half_layer_function", "layer_for"])
def test_a_users_layers_are_built(tmp_path: Path, ours: list[float], name: str) -> None:
    found, built = losses_with_spec(tmp_path, USERS, name)
    assert built == [1, 2]
    assert abs(found[-1] - ours[-1]) > 1e-4


def test_a_users_description_of_our_layer_is_our_layer(tmp_path: Path, ours: list[float]) -> None:
    assert losses_with_spec(tmp_path, USERS, "plain_layer") == (ours, [1, 2])


@pytest.mark.parametrize(
    "spec",
    [["local"], ["megatron.core.models.gpt.gpt_layer_specs", "get_gpt_layer_local_spec"]],
    ids=len,
)
def test_local_and_our_own_function_are_our_layer(
    tmp_path: Path, ours: list[float], spec: list[str]
) -> None:
    assert losses_with_spec(tmp_path, *spec) == (ours, [])


def start_with(rank: int, world_size: int, parsed: bool) -> tuple[int, int, int]:
    """initialize_megatron() behind a parser of the script's own."""
    argv = ["script.py", *SIX_STEPS, *([] if parsed else ["--somebody-elses", "5"])]
    with mock.patch("sys.argv", argv):
        if parsed:
            args = validate_args(parse_args())
            args.seed = 77
            initialize_megatron(parsed_args=args, args_defaults={"log_interval": 9})
        else:
            initialize_megatron(ignore_unknown_args=True)
    args = get_args()
    return args.seed, args.train_iters, get_tokenizer().vocab_size


@pytest.mark.parametrize(("parsed", "seed"), [(True, 77), (False, 1234)])
def test_start_up_takes_parsed_arguments_and_leaves_unknown_ones(parsed: bool, seed: int) -> None:
    (found,) = run_ranks(start_with, 1, parsed)
    assert found == (seed, 6, 101)

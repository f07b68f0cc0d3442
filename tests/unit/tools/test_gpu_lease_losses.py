"""tools/dev/lib/gpu_lease_losses.py: compare a run on a GPU with one on a CPU."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from tools.dev.lib import gpu_lease_losses
from tools.dev.lib.gpu_lease_losses import (
    BF16,
    FLAG_SETS,
    FP32,
    REFERENCE,
    STEPS,
    Training,
    compare,
)
from tools.dev.lib.gradient_sketches import gaps, sketch

HEADS = 4


def gradient(seed: int = 0) -> torch.Tensor:
    return torch.randn(HEADS, 32, 128, generator=torch.Generator().manual_seed(seed)) / 1e3


def training(values: torch.Tensor, losses: tuple[float, ...] = (6.5, 6.25)) -> Training:
    other = sketch("word_embeddings", gradient(1))
    return Training(losses, {"qkv": sketch("qkv", values), "word_embeddings": other})


@pytest.mark.parametrize("error", [1e-5, 1e-2, 1.0])
def test_a_sketch_estimates_the_size_of_a_difference(error: float) -> None:
    for seed in range(20):
        changed = gradient() + error * gradient(100 + seed)
        found = gaps({"qkv": sketch("qkv", changed)}, {"qkv": sketch("qkv", gradient())})
        assert error / 3 < found["qkv"] < 2 * error


def test_sketches_are_those_of_every_release_of_torch() -> None:
    assert sketch("a", torch.arange(1000)) == [
        18243.7,
        *(9564.0, -3524.0, -13752.0, -2332.0, 2100.0, -8742.0, 8696.0, 4368.0),
    ]


def test_gradients_of_all_heads_but_the_first_that_are_wrong_are_a_failure() -> None:
    """The losses of three steps would not show it: Adam's first step has the size of its rate."""
    wanted = training(gradient())
    rounded = gradient().bfloat16().float()
    assert compare(training(rounded), wanted, BF16).startswith("ok: relative differences of losses")
    wrong = gradient()
    wrong[1:] = gradient(7)[1:]
    assert compare(training(wrong), wanted, BF16).startswith("failed: relative differences of qkv ")
    assert compare(training(1.1 * gradient()), wanted, BF16).startswith("failed")


def test_a_gemm_in_tf32_is_a_failure_in_fp32() -> None:
    bits = gradient().view(torch.int32)
    tf32 = (bits + 0x1000 & ~0x1FFF).view(torch.float32)
    assert compare(training(tf32), training(gradient()), FP32).startswith("failed")


def test_a_gradient_that_is_a_sum_of_roundings_is_compared_with_all_gradients() -> None:
    wanted = training(gradient())
    tiny = {"k.bias": sketch("k.bias", 1e-6 * gradient(3))}
    other = {"k.bias": sketch("k.bias", 1e-6 * gradient(4))}
    found = gaps({**wanted.gradients, **other}, {**wanted.gradients, **tiny})
    assert found["k.bias"] < 2e-4


def test_losses_that_differ_or_are_missing_are_failures() -> None:
    wanted = training(gradient())
    for losses in ((6.5, math.nan), (6.5, 6.3)):
        result = compare(training(gradient(), losses), wanted, BF16)
        assert result.startswith("failed: relative differences of losses 0.0e+00, ")
    assert compare(training(gradient(), (6.5,)), wanted, BF16) == "failed: 1 losses, not 2"
    without = Training(wanted.losses, {"qkv": wanted.gradients["qkv"]})
    assert compare(without, wanted, BF16) == ("failed: relative differences of word_embeddings nan")


def test_a_run_that_saved_nothing_is_a_failure(tmp_path: Path) -> None:
    result = gpu_lease_losses.judge("lm loss: 6.5 |", tmp_path / "none", None, BF16)
    assert result.startswith("failed: ")


def test_what_is_stored_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_lease_losses, "REFERENCE", tmp_path / "stored.json")
    trainings = {"one": training(gradient()), "other": training(gradient(2))}
    gpu_lease_losses.store(trainings)
    found = gpu_lease_losses.known_trainings()
    assert found == {n: Training(list(t.losses), t.gradients) for n, t in trainings.items()}


def test_each_flag_set_has_losses_and_gradients_of_a_cpu() -> None:
    known = json.loads(REFERENCE.read_text())
    assert known.keys() == FLAG_SETS.keys()
    for name, found in gpu_lease_losses.known_trainings().items():
        assert len(found.losses) == (1 if "--log-interval 3" in FLAG_SETS[name].flags else STEPS)
        assert len(found.gradients) > 10

"""On a CPU, gradients of one backward pass stay in 16 bits, and train like fp32 gradients.

A GPU keeps them in fp32, because its GEMM writes weight gradients in fp32.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megatron.core.optimizer import clip_grads, optimizer
from megatron.training.runtime import setup
from tests.support import host_gpu
from tests.support.ranks import run_ranks
from tests.support.runs import TINY, train_gpt, without_times

ONE = "--bf16 --global-batch-size 2 --train-iters 3".split()
UNWIDENED = "torch.float32" if host_gpu.is_asked() else "torch.bfloat16"


def _train(rank: int, size: int, argv: Sequence[str], widen: bool, dtypes: set[str]) -> None:
    """The run of ``argv``, whose gradients come to the optimizer in ``dtypes``."""

    def norm(grads: list[Any], *args: Any, **kwargs: Any) -> Any:
        assert {str(grad.dtype) for _, grad in grads} == dtypes
        return clip_grads.squared_norm(grads, *args, **kwargs)

    chosen = setup._sums_gradients
    with (
        mock.patch.object(optimizer, "squared_norm", norm),
        mock.patch.object(setup, "_sums_gradients", lambda run: widen or chosen(run)),
    ):
        train_gpt(rank, size, argv)


def _run(folder: Path, *flags: str, widen: bool, dtypes: set[str]) -> list[dict[str, Any]]:
    folder.mkdir()
    metrics = folder / "metrics.jsonl"
    run_ranks(_train, 1, [*TINY, "--metrics-file", str(metrics), *flags], widen, dtypes)
    return without_times([json.loads(line) for line in metrics.read_text().splitlines()])


@pytest.mark.feature("Optimizers: no fp32 gradients on a CPU where there is nothing to add up")
def test_a_single_gradient_trains_alike_in_16_bits_and_in_fp32(tmp_path: Path) -> None:
    kept = _run(tmp_path / "kept", *ONE, widen=False, dtypes={UNWIDENED})
    assert kept == _run(tmp_path / "summed", *ONE, widen=True, dtypes={"torch.float32"})


@pytest.mark.parametrize(
    "flags", ["--bf16", f"{' '.join(ONE)} --calculate-per-token-loss"], ids=["steps", "tokens"]
)
def test_sums_and_quotients_of_gradients_are_fp32(tmp_path: Path, flags: str) -> None:
    argv = [*flags.split(), "--train-iters", "1"]
    assert _run(tmp_path / "run", *argv, widen=False, dtypes={"torch.float32"})

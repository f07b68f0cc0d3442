"""Kernels of the GPU on a CPU: run by triton's interpreter, and compiled for three GPUs.

Each in a process of its own: triton decides when it is imported who runs a kernel, so that those
that compile may be forked from one that has imported it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.core.optional import why_missing
from tests.support import forked, selection, triton_memory
from tests.support.ranks import ROOT

pytestmark = pytest.mark.skipif(
    why_missing("triton") is not None, reason=why_missing("triton") or ""
)


def outcome(python: str, *command: str, **environ: str) -> str:
    ended = subprocess.run(
        [python, "-m", *command],
        cwd=ROOT,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stdout[-8000:] + ended.stderr[-2000:]
    return ended.stdout


@pytest.mark.feature("Speed: on a GPU, kernels in Triton with the values of their plain forms")
@pytest.mark.parametrize(
    "cases", selection.first(1, ["tests.support.first_cases", "no:cacheprovider"])
)
def test_interpreted_kernels_have_values_and_gradients_of_their_plain_forms(cases: str) -> None:
    command = ("pytest", "-q", "-p", cases, "tests/gpu")
    said = outcome(sys.executable, *command, TRITON_INTERPRET="1")
    assert "passed" in said
    assert "skipped" not in said


@pytest.mark.slow
def test_interpreted_kernels_access_only_memory_of_tensors() -> None:
    command = ("pytest", "-q", "-p", "no:cacheprovider", "tests/gpu")
    environ = {"TRITON_INTERPRET": "1", triton_memory.ASKED: "1"}
    assert "passed" in outcome(sys.executable, *command, **environ)


@pytest.mark.feature("Platforms: kernels compile for A100, H100 and B200")
@pytest.mark.parametrize("target", selection.only([90], [80, 90, 100]))
def test_each_kernel_compiles(target: int, tmp_path: Path) -> None:
    """With the arguments of the first test that calls it."""
    words = ("tests.support.kernel_compiling", str(target), "--once")
    assert "passed" in outcome(forked.python(), *words, TRITON_CACHE_DIR=str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("target", [80, 90, 100])
def test_each_kernel_compiles_with_the_arguments_of_all_tests(target: int, tmp_path: Path) -> None:
    words = ("tests.support.kernel_compiling", str(target))
    assert "passed" in outcome(forked.python(), *words, TRITON_CACHE_DIR=str(tmp_path))

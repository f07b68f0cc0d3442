"""Kernels of the GPU on a CPU: run by triton's interpreter, and compiled for an H100.

Each in a process of its own: triton decides when it is imported who runs a kernel.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.core.optional import why_missing
from tests.ranks import ROOT

pytestmark = pytest.mark.skipif(
    why_missing("triton") is not None, reason=why_missing("triton") or ""
)


def outcome(*command: str, **environ: str) -> str:
    ended = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=ROOT,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stdout[-8000:] + ended.stderr[-2000:]
    return ended.stdout


@pytest.mark.feature("Speed: on a GPU, kernels in Triton with the values of their plain forms")
def test_interpreted_kernels_have_values_and_gradients_of_their_plain_forms() -> None:
    said = outcome("pytest", "-q", "-p", "no:cacheprovider", "tests/gpu", TRITON_INTERPRET="1")
    assert "passed" in said
    assert "skipped" not in said


def test_kernels_compile_for_an_h100(tmp_path: Path) -> None:
    """For bf16, and what has no choice; not again what differs only in values."""
    again = "equal_scores or 499 or rotary and 14 or routing and False and not groups"
    chosen = f"(dtype1 or fp8-fp16 or not (dtype or fp)) and not ({again})"
    words = ("tests.gpu.compiling", "-k", chosen)
    assert "passed" in outcome(*words, TRITON_CACHE_DIR=str(tmp_path))

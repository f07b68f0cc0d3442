"""What a process on a CPU sets once."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron.core.device import cpu_tuning
from tests.support.ranks import run_ranks

_BLOCK = 64 << 20


@pytest.fixture(autouse=True)
def precision_as_before() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def cleared_pages(rank: int, world_size: int, keep: bool) -> tuple[bool, int]:
    """Pages that the kernel has to clear when a large block is asked for again and again.

    Where a small block took a piece of a freed one, the heap grows a few times before it settles.
    """
    kept = keep and cpu_tuning.keep_freed_memory()
    for _ in range(10):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.empty(_BLOCK, dtype=torch.uint8).fill_(1)
    return kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_freed_memory_is_used_again_without_the_kernel() -> None:
    [(_, without)] = run_ranks(cleared_pages, 1, False)
    [(kept, pages)] = run_ranks(cleared_pages, 1, True)
    assert pages < without / 10 if kept else pages > 0


def flags_of_memory(rank: int, world_size: int) -> list[bool]:
    """Whether Linux was asked for huge pages for a large, a small and another large tensor."""
    tensors = [torch.empty(size, dtype=torch.uint8) for size in (_BLOCK, 1 << 20, _BLOCK)]
    cpu_tuning.use_huge_pages(tensors[:2])
    found = [False] * len(tensors)
    inside = [False] * len(tensors)
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *values = line.split()
        if not name.endswith(":"):
            start, stop = (int(x, 16) for x in name.split("-"))
            middles = [t.data_ptr() + t.nbytes // 2 for t in tensors]
            inside = [start <= middle < stop for middle in middles]
        elif name == "VmFlags:":
            found = [
                old or (here and "hg" in values) for old, here in zip(found, inside, strict=True)
            ]
    return found


def test_huge_pages_are_asked_for_large_tensors_alone() -> None:
    cpu_tuning.use_huge_pages([torch.empty(_BLOCK, device="meta")])
    if not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("this kernel has no transparent huge pages")
    assert run_ranks(flags_of_memory, 1) == [[True, False, False]]


@pytest.mark.parametrize("hidden_size", [64, 1024])
def test_chosen_products_are_those_of_float32(hidden_size: int) -> None:
    is_chosen = cpu_tuning.choose_float32_products(hidden_size)
    assert torch.get_float32_matmul_precision() == ("medium" if is_chosen else "highest")
    assert hidden_size > 64 or not is_chosen
    torch.manual_seed(0)
    a, b = torch.randn(256, 300), torch.randn(300, 200)
    exact = a.double() @ b.double()
    assert (a @ b - exact).norm() < 1e-6 * exact.norm()
    assert torch.equal(a @ b, a @ b)


def test_products_that_lose_digits_are_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_tuning, "_products_are_float32", lambda: False)
    assert not cpu_tuning.choose_float32_products(1024)
    assert torch.get_float32_matmul_precision() == "highest"


def test_a_precision_that_somebody_has_set_stays() -> None:
    torch.set_float32_matmul_precision("high")
    assert not cpu_tuning.choose_float32_products(1024)
    assert torch.get_float32_matmul_precision() == "high"


def test_a_cpu_without_bf16_instructions_is_known():
    """torch and oneDNN can be told to do without what the CPU has, in a process of its own."""
    asked = "from megatron.core.device import cpu_tuning; print(cpu_tuning.multiplies_bf16())"
    environ = {**os.environ, "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    if platform.machine() != "x86_64":
        pytest.skip("AVX2 is of x86")
    done = subprocess.run(
        [sys.executable, "-c", asked], env=environ, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"

"""Triton kernels at the sizes of large runs: addresses, grids, shared memory and barriers.

Nothing runs: the launches are recorded, and the kernels are lowered for a GPU.
"""

from __future__ import annotations

import ast
import importlib
import math
import os
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.fusions import triton as ours
from tests.support.large_launches import large_launches
from tests.support.triton_addresses import overflows
from tests.support.triton_launches import (
    Launch,
    compiling_for,
    launches_of,
    lowered,
    specialization_of,
)

triton: Any = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"
)
_LARGE = large_launches()
# Shared memory of a block in KiB by compute capability.
_SHARED_KIB = {80: 163, 86: 99, 90: 227, 100: 227, 120: 99}


@pytest.fixture(autouse=True)
def an_h100() -> Iterator[None]:
    with compiling_for(90):
        yield


def _once(launches: list[Launch]) -> list[Launch]:
    """Return one launch for each compiled kernel."""
    return list({specialization_of(each): each for each in launches}.values())


@pytest.mark.parametrize("name", _LARGE)
def test_no_address_exceeds_32_bits_that_has_32_bits(name: str) -> None:
    wrong = []
    seen = set()
    for launch in launches_of(_LARGE[name]):
        what = specialization_of(launch), str(launch.numbers), launch.grid
        if what not in seen:
            seen.add(what)
            found = overflows(lowered(launch, "ttir")[0], launch.numbers, launch.grid)
            wrong += [f"{launch.name}: {line}" for line in found]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", _LARGE)
def test_grids_are_within_the_limits_of_a_gpu(name: str) -> None:
    for launch in launches_of(_LARGE[name]):
        assert all(n <= 65535 for n in launch.grid[1:]), launch.name
        # Triton's launcher multiplies in 32 bits, and launches nothing if the product is negative.
        assert 0 < math.prod(launch.grid) < 2**31, launch.name


def test_every_kernel_is_launched() -> None:
    sources = [path.read_text() for path in Path(ours.__path__[0]).glob("*.py")]
    kernels = set()
    for module in pkgutil.iter_modules(ours.__path__):
        found = vars(importlib.import_module(f"{ours.__name__}.{module.name}")).values()
        kernels |= {k for k in found if isinstance(k, triton.runtime.JITFunction)}
    of_others = {  # kernels call them
        k for k in kernels if any(re.search(rf"(?<!def )\b{k.__name__}\(", s) for s in sources)
    }
    launched = {each.kernel for call in _LARGE.values() for each in launches_of(call)}
    assert {k.__name__ for k in kernels - of_others - launched} == set()


def test_every_matmul_states_its_precision() -> None:
    """Without it, Triton multiplies float32 in tf32."""
    for path in Path(ours.__path__[0]).glob("*.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "tl.dot":
                stated = {keyword.arg for keyword in call.keywords}
                assert "input_precision" in stated, f"{path.name}:{call.lineno}"


@pytest.mark.slow
@pytest.mark.parametrize("capability", _SHARED_KIB)
@pytest.mark.parametrize("name", _LARGE)
def test_a_gpu_has_the_shared_memory(name: str, capability: int) -> None:
    with compiling_for(capability):
        for launch in _once(launches_of(_LARGE[name])):
            if capability < 89 and any(_is_fp8(x) for x in launch.args):
                continue
            _, report = lowered(launch, "llir")
            assert report["shared"] <= _SHARED_KIB[capability] * 2**10, launch.name


def _is_fp8(x: object) -> bool:
    return isinstance(x, torch.Tensor) and x.dtype in (torch.float8_e4m3fn, torch.float8_e5m2)


def _waits_before_store(launch: Launch, pointer: str) -> bool:
    """Return whether all threads wait between the loads and the stores of ``pointer``."""
    code, _ = lowered(launch, "ttgir")
    addresses = {f"%{pointer}"}
    order = ""
    for line in code.splitlines():
        names = re.findall(r"%[\w$.\-]+", line.partition(" loc(")[0])
        if re.search(r"\b(gpu|ttg)\.(local_)?barrier\b", line):
            order += "b"
        elif re.search(r"\btt\.store\b", line) and names[0] in addresses:
            order += "s"
        elif re.search(r"= tt\.load\b", line) and names[1] in addresses:
            order += "l"
        elif re.search(r"= (tt|ttg)\.(addptr|splat|broadcast|convert_layout|expand_dims)\b", line):
            addresses |= {names[0]} if names[1] in addresses else set()
    assert "l" in order
    return bool(re.fullmatch(r"[^sl]*s*l+b[^s]*s", order))


@pytest.mark.parametrize("columns", [100, 256, 4096])
def test_warps_that_load_logits_wait_before_one_overwrites_them(columns: int) -> None:
    loss: Any = importlib.import_module(f"{ours.__name__}.cross_entropy")
    logits = torch.empty(4, columns, device="meta", dtype=torch.bfloat16)
    target = torch.empty(4, device="meta", dtype=torch.int64)
    (launch,) = launches_of(lambda: loss.loss_and_gradient(logits, target, columns, 1.0))
    assert _waits_before_store(launch, "Logits")

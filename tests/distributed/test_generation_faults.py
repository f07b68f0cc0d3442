"""Faults of an engine's ranks: all ranks end soon, and say whose fault it was."""

from __future__ import annotations

import os
import resource
import signal
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megatron.core.config.errors import ConfigError
from megatron.core.diagnostics.collective_tracer import waiting_for_work
from megatron.core.inference.paged_engine.options import EngineOptions
from megatron.training.fault_tolerance.failure_watch import failure_watch
from tests.support import ranks, selection
from tests.support.ranks import run_ranks
from tests.unit.inference.test_engine import engine, requests

LAYOUTS = [(2, {"tp": 2}), (2, {"pp": 2}), (2, {})]
EXPERTS = (2, {"ep": 2})


def generate(
    rank: int, world_size: int, folder: str, sizes: dict[str, int], timeout_s: float, idle_s: float
) -> int:
    """Generate under a watch; rank 0 first has nothing to do for ``idle_s``."""
    os.dup2(os.open(f"{folder}/stderr{rank}", os.O_WRONLY | os.O_CREAT), 2)
    with ExitStack() as watch:
        watch.enter_context(failure_watch(poll_s=0.05, timeout_s=timeout_s))
        watch.enter_context(waiting_for_work(True))
        options = EngineOptions(page_size=4, timeout_s=timeout_s)
        made = engine(options, world_size, sizes)
        if rank:
            made.follow()
            return 0
        threading.Event().wait(idle_s)
        found = made.generate(requests())
        made.close()
        return len(found)


def said_with_fault(folder: Path, fault: str, sizes: dict[str, int], timeout_s: float) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAULTS", fault)
        patch.setattr(ranks, "GRACE_S", 2 if "stop" in fault else 30)  # the others end themselves
        with pytest.raises(AssertionError, match="exit code 1"):
            run_ranks(generate, 2, str(folder), sizes, timeout_s, 0.0)
    return [(folder / f"stderr{rank}").read_text() for rank in range(2)]


@pytest.mark.feature("Generation: a killed rank of the engine ends all ranks and is named")
@pytest.mark.parametrize(("world", "sizes"), LAYOUTS)
def test_a_killed_rank_ends_the_engine(world: int, sizes: dict[str, int], tmp_path: Path) -> None:
    said, _ = said_with_fault(tmp_path, "inference.step:kill:rank1:step4", sizes, 60)
    assert "rank 1 failed: its process" in said.splitlines()[-1]


@pytest.mark.parametrize(("world", "sizes"), LAYOUTS)
@pytest.mark.parametrize("rank", selection.only([1], [0, 1]))
def test_an_exception_on_one_rank_ends_all(
    rank: int, world: int, sizes: dict[str, int], tmp_path: Path
) -> None:
    said = said_with_fault(tmp_path, f"inference.step:raise:rank{rank}:step4", sizes, 60)
    message = f"rank {rank} failed: InjectedFault: injected by FAULTS at inference.step"
    assert [text.splitlines()[-1] for text in said] == [message] * 2


@pytest.mark.feature("Generation: a rank of the engine that has stopped is named")
def test_a_stopped_rank_is_named(tmp_path: Path) -> None:
    said, _ = said_with_fault(tmp_path, "inference.step:stop:rank1:step4", {}, 2)
    assert "rank 0 waits in generation control recv 1->0" in said
    assert "rank 1: does not answer" in said
    assert "Timed out" in said.splitlines()[-1]


def generate_until_named(rank: int, world_size: int, folder: str, sizes: dict[str, int]) -> None:
    """Generate with a rank 1 that stops; kill it when rank 0 has named it."""
    processes: list[int] = [0] * world_size
    dist.all_gather_object(processes, os.getpid())
    reader, writer = os.pipe()
    os.dup2(writer, 2)

    def pass_on() -> None:
        with open(reader, encoding="utf-8") as lines, open(f"{folder}/stderr{rank}", "w") as file:
            for line in lines:
                file.write(line)
                file.flush()
                if line == "rank 1: does not answer\n":
                    os.kill(processes[1], signal.SIGKILL)

    threading.Thread(target=pass_on, daemon=True).start()
    with ExitStack() as watch:
        watch.enter_context(failure_watch(poll_s=0.05, timeout_s=60, patience_s=0.2))
        watch.enter_context(waiting_for_work(True))
        made = engine(EngineOptions(page_size=4), world_size, sizes)
        if rank:
            made.follow()
        else:
            made.generate(requests())


@pytest.mark.feature("Generation: a stopped rank is named long before the timeout of collectives")
@pytest.mark.parametrize("axis", ["tp", "pp"])
def test_a_stopped_rank_is_named_before_any_timeout(
    axis: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAULTS", "inference.step:stop:rank1:step4")
    monkeypatch.setattr(ranks, "GRACE_S", 30)
    with pytest.raises(AssertionError, match="SIGKILL"):
        run_ranks(generate_until_named, 2, str(tmp_path), {axis: 2})
    said = (tmp_path / "stderr0").read_text()
    assert "rank 0: waits in " in said
    assert "rank 1: does not answer\n" in said
    assert "imed out" not in said


def test_an_idle_engine_is_no_stall(tmp_path: Path) -> None:
    found = run_ranks(generate, 2, str(tmp_path), {"pp": 2}, 1.0, 1.5)
    assert found == [len(requests()), 0]
    assert [(tmp_path / f"stderr{rank}").read_text() for rank in range(2)] == ["", ""]


def without_memory(rank: int, world_size: int) -> str:
    """Rank 1 may use 300 MB more than now: too little for its cache."""
    made: dict[str, Any] = {"page_size": 64, "buffer_bytes": 2**32, "max_requests": 20000}
    if rank == 1:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        limits = (used + 300 * 2**20, resource.RLIM_INFINITY)
        resource.setrlimit(resource.RLIMIT_AS, limits)
    with pytest.raises(ConfigError) as error:
        engine(EngineOptions(**made), world_size, {"tp": 2})
    return str(error.value)


@pytest.mark.feature("Generation: lack of memory for the KV cache names the flag to lower")
def test_lack_of_memory_for_the_cache_names_the_flag() -> None:
    for said in run_ranks(without_memory, 2):
        assert said.startswith("--inference-dynamic-batching-buffer-size-gb 4: rank 1 has too")
        assert said.endswith("lower it")


def test_a_full_cache_is_allocated_before_the_first_request() -> None:
    made = engine(EngineOptions(page_size=4, max_requests=2), 1, {})
    cache = made._runner.cache

    def allocated() -> list[int]:
        kept = (*cache._layers.values(), *cache.states.values(), *cache.others.values())
        return [part.data_ptr() for parts in kept for part in parts]

    before = allocated()
    made.generate(requests())
    assert allocated() == before != []

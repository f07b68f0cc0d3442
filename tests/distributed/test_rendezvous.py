"""Ranks that are absent are named while the others wait for them."""

from __future__ import annotations

import itertools
import signal
import socket
import threading
from dataclasses import replace
from datetime import timedelta

import pytest
import torch.distributed as dist

from megatron.core import device
from megatron.core.config.errors import LaunchError
from megatron.training import initialize
from megatron.training.process import rendezvous
from megatron.training.process.signals import StopSignal
from tests.support.command_lines import run_of
from tests.support.ranks import run_ranks


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the clock finds it a second later; nobody sleeps."""
    ticks = itertools.count()
    monkeypatch.setattr(rendezvous.time, "monotonic", lambda: float(next(ticks)))
    monkeypatch.setattr(rendezvous.time, "sleep", lambda seconds: None)


def _wait(world_size: int, timeout_s: float) -> None:
    patience = rendezvous._Patience(0, timeout_s)
    rendezvous.wait_for_all(dist.HashStore(), 0, world_size, patience)


@pytest.mark.usefixtures("clock")
@pytest.mark.feature("Running: ranks that do not come are named while the others wait")
def test_absent_ranks_are_named_from_time_to_time(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(LaunchError) as caught:
        _wait(3, timeout_s=100)
    assert "rank 0 has waited 101 s for ranks 1 2: look for the first error" in str(caught.value)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "rank 0 has waited 11 s for ranks 1 2",
        "rank 0 has waited 72 s for ranks 1 2",
    ]


@pytest.mark.usefixtures("clock")
def test_a_signal_ends_the_wait_for_absent_ranks() -> None:
    before = signal.getsignal(signal.SIGTERM)
    handler = StopSignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, handler)
    try:
        handler(signal.SIGTERM, None)
        with pytest.raises(LaunchError, match="SIGTERM came while rank 0 waited for rank 1"):
            _wait(2, timeout_s=100)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_ranks_that_are_all_there_do_not_wait() -> None:
    store = dist.HashStore()
    patience = rendezvous._Patience(0, 60)
    ranks = [
        threading.Thread(target=rendezvous.wait_for_all, args=(store, rank, 3, patience))
        for rank in range(3)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
    assert not any(rank.is_alive() for rank in ranks)


def _arrive_twice(rank: int, world_size: int, port: int, returns_first: int) -> str:
    """As torchrun restarts ranks: the store stays; nobody that has come before is there."""
    dist.destroy_process_group()
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    dead = rendezvous.wait_for_all(store, rank, world_size, rendezvous._Patience(rank, 60))
    dead.set(f"address/{rank}", "of a rank that has ended")
    store.add("ended", 1)
    while store.add("ended", 0) < world_size:
        pass
    while rank != returns_first and store.add("arrivals", 0) == world_size:
        pass  # the others come later
    new = rendezvous.wait_for_all(store, rank, world_size, rendezvous._Patience(rank, 60))
    found = sum(new.check([f"address/{other}"]) for other in range(world_size))
    store.add("done", 1)
    while rank == 0 and store.add("done", 0) < world_size:
        pass
    return str(found)


@pytest.mark.parametrize("returns_first", [0, 1])
@pytest.mark.feature("Running: ranks that torchrun restarts do not meet the ones that have ended")
def test_ranks_that_are_restarted_find_nothing_of_the_start_before(returns_first: int) -> None:
    assert run_ranks(_arrive_twice, 3, _free_port(), returns_first) == ["0", "0", "0"]


def _meet(rank: int, world_size: int, port: int, monkey: dict[str, str]) -> str:
    dist.destroy_process_group()
    rendezvous.os.environ.update(monkey, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    store = rendezvous.meet(rank, world_size, timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    dist.barrier()
    return str(dist.get_world_size())


def _free_port() -> int:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return int(unused.getsockname()[1])


def test_ranks_meet_at_the_address_of_the_environment() -> None:
    assert run_ranks(_meet, 3, _free_port(), {}) == ["3", "3", "3"]


@pytest.mark.usefixtures("clock")
def test_rank_0_does_not_wait_in_silence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The store that it serves must not wait for the others inside torch."""
    for name, value in (("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", str(_free_port()))):
        monkeypatch.setenv(name, value)
    with pytest.raises(LaunchError, match="rank 0 has waited .* for ranks 1 2"):
        rendezvous.meet(0, 3, timedelta(seconds=30))
    assert "rank 0 has waited 11 s for ranks 1 2" in capsys.readouterr().err


def test_a_port_that_is_taken_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1")):
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("MASTER_PORT", str(port))
        with pytest.raises(LaunchError, match=f"rank 0 cannot listen at .*MASTER_PORT {port}"):
            rendezvous.meet(0, 2, timedelta(seconds=60))


@pytest.mark.usefixtures("clock")
def test_a_store_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    port = _free_port()
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", str(port))
    expected = f"rank 1 has waited .* for the store at MASTER_ADDR 127.0.0.1, MASTER_PORT {port}"
    with pytest.raises(LaunchError, match=expected):
        rendezvous.meet(1, 2, timedelta(seconds=60))


@pytest.mark.feature("Running: two ranks on one GPU are named before NCCL fails")
def test_two_ranks_on_one_gpu_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    for rank, gpu in ((0, "GPU-a"), (1, "GPU-b")):
        monkeypatch.setattr(rendezvous.device, "uuid", lambda gpu=gpu: gpu)
        rendezvous.claim_gpu(store, rank)
    with pytest.raises(LaunchError, match="ranks 1 and 2 are both on GPU-b: NCCL needs a GPU"):
        rendezvous.claim_gpu(store, 2)


def test_nccl_is_started_by_ranks_that_have_claimed_their_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """gloo connects ranks on one GPU as well."""
    config = run_of(world_size=2)
    started = []
    claims = []
    devices = []
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setattr(initialize, "meet", lambda *_: dist.HashStore())
    monkeypatch.setattr(initialize, "claim_gpu", lambda store, rank: claims.append(rank))
    monkeypatch.setattr(initialize.dist, "is_initialized", lambda: False)
    monkeypatch.setattr(
        initialize.dist,
        "init_process_group",
        lambda backend, **more: (started.append(backend), devices.append(more.get("device_id"))),
    )
    with device.simulate_device("cuda"):
        for backend in ("nccl", "gloo"):
            distributed = replace(config.distributed, distributed_backend=backend)
            initialize._init_default_group(replace(config, distributed=distributed), None)
    assert started == ["nccl", "gloo"]
    assert claims == [1]
    assert devices == [None, None], "see _init_default_group"

"""Settings of NCCL communicators: from the flags and the file to what torch is given."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.core import device
from megatron.core.config.errors import ConfigError
from megatron.core.parallel.communicators import (
    Communicators,
    CommunicatorSettings,
    read_settings,
    resolve_settings,
)
from megatron.core.parallel.process_groups_config import create_process_groups, make_grids
from megatron.training.runtime.setup import high_priority_groups
from tests.support.command_lines import run_of
from tests.support.host_gpu import nccl

HIGH = CommunicatorSettings(is_high_priority_stream=True)
MINUTE = timedelta(minutes=1)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "nccl.yaml"
    path.write_text(
        "tp: {cga_cluster_size: 4, min_ctas: 4, max_ctas: 16, net_name: IB}\n"
        "ep_dp:\n  is_high_priority_stream: true\n"
        "nobody: {max_ctas: 2}\n"
        "cp: {max_cta: 2}\n"
    )
    return path


def test_the_file_sets_values_by_group_and_reports_what_has_no_effect(file: Path) -> None:
    settings, warnings = resolve_settings(read_settings(str(file)), ["tp", "dp_cp", "pq"])
    assert settings == {
        "tp": CommunicatorSettings(True, 4, 4, 16, "IB"),
        "expt_dp": HIGH,
        "dp_cp": HIGH,
        "cp": CommunicatorSettings(),
    }
    assert [next(w for w in ("nobody", "max_cta ", "pq") if w in text) for text in warnings] == [
        "nobody",
        "max_cta ",
        "pq",
    ]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"net_name": "tcp"}, "net_name is 'tcp'; use ib or socket"),
        ({"max_ctas": "many"}, "max_ctas is 'many'; use an integer"),
        ({"min_ctas": 8, "max_ctas": 4}, "min_ctas 8 is larger than max_ctas 4"),
        ({"is_high_priority_stream": 1}, "is_high_priority_stream is 1; use true or false"),
    ],
)
def test_a_value_that_nccl_would_refuse_is_an_error(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=f"group dp: {words}"):
        resolve_settings({"dp": values})


@pytest.mark.parametrize("text", ["- tp", "tp: 3", "tp: {a: [}", "[" * 50_000, "a: 2001-99-99"])
def test_a_file_of_another_form_is_an_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "nccl.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="--nccl-communicator-config-path .*nccl.yaml: "):
        read_settings(str(path))


def test_a_missing_file_is_an_error() -> None:
    with pytest.raises(ConfigError, match="none.yaml"):
        read_settings("none.yaml")


def test_the_stand_in_of_the_tests_has_the_members_torch_declares() -> None:
    stub = Path(torch.__file__).parent / "_C/_distributed_c10d.pyi"
    declared = stub.read_text().split("class ProcessGroupNCCL(Backend):")[1].split("\nclass ")[0]
    options = declared.split("class Options(Backend.Options):")[1]
    assert "def __init__(self, is_high_priority_stream: bool = False)" in options
    (parameter,) = inspect.signature(nccl.Options).parameters.values()
    assert (parameter.name, parameter.default) == ("is_high_priority_stream", False)
    for name in ("cga_cluster_size", "min_ctas", "max_ctas"):
        assert f"{name}: int" in declared


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Options by description of the groups that this process, one of 8, asks torch for."""
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=8)
    asked: dict[str, Any] = {}
    new_group = dist.new_group

    def noted(ranks: list[int], *, pg_options: Any, group_desc: str, **rest: Any) -> Any:
        assert rest["timeout"] == MINUTE
        asked[group_desc] = pg_options
        return new_group(ranks, group_desc=group_desc, **rest)

    monkeypatch.setattr(dist, "ProcessGroupNCCL", nccl.ProcessGroupNCCL, raising=False)
    monkeypatch.setattr(dist, "new_group", noted)
    yield asked
    dist.destroy_process_group()


@pytest.mark.feature("Communication: NCCL settings and stream priority of each process group")
def test_groups_get_their_settings_and_the_others_stay_shared(
    made: dict[str, Any], file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_backend", lambda group=None: "nccl")
    told: list[str] = []
    communicators = Communicators.from_flags(MINUTE, str(file), ["dp_cp"], told.append)
    groups = create_process_groups(*make_grids(8, tp=2), communicators=communicators)
    assert len(told) == 2
    tp = made["tp"]
    assert (tp.is_high_priority_stream, tp.config.max_ctas, tp._timeout) == (False, 16, MINUTE)
    assert tp.config.net_name == "IB"
    assert not hasattr(tp.config, "blocking")  # NCCL's default
    assert made["dp_cp"].is_high_priority_stream
    assert groups.intra_dp_cp is groups.dp_cp is not groups.dp
    assert groups.tp is not groups.expt_tp
    assert made["dp"] is None
    ranks = dist.get_process_group_ranks
    assert ranks(groups.dp) == ranks(groups.dp_cp)


def test_a_group_of_the_whole_world_has_settings_too(made: dict[str, Any]) -> None:
    communicators = Communicators(MINUTE, {"dp_cp": HIGH})
    groups = create_process_groups(*make_grids(8), communicators=communicators)
    assert made["dp_cp"].is_high_priority_stream
    assert groups.dp is dist.group.WORLD is not groups.dp_cp


def test_another_library_than_nccl_gets_none(made: dict[str, Any], file: Path) -> None:
    assert Communicators.from_flags(MINUTE, str(file), ["dp"]) == Communicators(MINUTE)


def test_fully_sharded_parameters_are_gathered_on_a_high_priority_stream() -> None:
    assert high_priority_groups(run_of("--high-priority-stream-groups tp ep")) == ("tp", "ep")
    fsdp = "--use-torch-fsdp2 --high-priority-stream-groups dp_cp tp"
    assert high_priority_groups(run_of(fsdp)) == ("dp_cp", "tp")
    experts = "--num-experts 4 --expert-model-parallel-size 2 --use-torch-fsdp2"
    assert high_priority_groups(run_of(experts, 4)) == ("dp_cp", "ep_dp")


@pytest.mark.feature("Speed: collectives that overlap with GEMMs run on high-priority streams")
def test_tensor_and_context_parallelism_have_priority_unless_launch_order_decides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    both = run_of("--tensor-model-parallel-size 2 --context-parallel-size 2", 4)
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    assert high_priority_groups(both) == ("tp", "cp", "cp_inner", "cp_outer")
    assert resolve_settings({}, high_priority_groups(both))[1] == []
    assert high_priority_groups(run_of()) == ()
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    assert high_priority_groups(both) == ()
    # A GPU of compute capability 10.0, Blackwell, has no such order.
    monkeypatch.setattr(device, "_current", torch.device("cuda"))
    for capability, groups in (((9, 0), 0), ((10, 0), 4)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        assert len(high_priority_groups(both)) == groups

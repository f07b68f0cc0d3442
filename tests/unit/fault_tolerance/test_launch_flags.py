"""The command line of tools/launch.py: torchrun's flags, and refusals with exit status 2."""

from __future__ import annotations

import argparse
import fcntl
import os
from contextlib import ExitStack
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from megatron.core.config.errors import ConfigError
from megatron.training.fault_tolerance import launch_flags
from megatron.training.fault_tolerance.launch_flags import parse, parser, value_of
from megatron.training.fault_tolerance.rendezvous import nodes_that_fit
from megatron.training.fault_tolerance.restart_policy import History
from megatron.training.fault_tolerance.supervisor import older_checkpoint, restart_flags
from megatron.training.process.shared_memory import lock_folder
from tests.support.tiny_checkpoint import publish_model
from tools import launch

_SCRIPT = __file__  # any file


def test_every_flag_of_torchrun_is_taken() -> None:
    theirs = {flag for action in get_args_parser()._actions for flag in action.option_strings}
    ours = {flag for action in parser()._actions for flag in action.option_strings}
    assert theirs <= ours


def test_a_command_line_of_torchrun_starts_the_same_ranks(tmp_path: Path) -> None:
    flags = "--nnodes 2 --node_rank 1 --nproc_per_node 4 --master_addr node0 --master_port 6000"
    launch = parse([*flags.split(), "--log-dir", str(tmp_path), _SCRIPT, "--lr", "1", "--x=2"])
    assert (launch.config.min_nodes, launch.config.nproc_per_node) == (2, 4)
    assert (launch.config.rdzv_backend, launch.config.rdzv_endpoint) == ("c10d", "node0:6000")
    assert launch.config.rdzv_configs["is_host"] == "false"
    assert launch.script == ("-u", _SCRIPT, "--lr", "1", "--x=2")
    assert launch.folder == tmp_path
    assert launch.options.max_restarts > 1


def test_one_node_needs_no_address(tmp_path: Path) -> None:
    first, second = (parse(["--exit-report-dir", str(tmp_path), _SCRIPT]) for _ in range(2))
    assert first.config.rdzv_endpoint == "localhost:0"
    assert first.config.run_id != second.config.run_id, "two runs on a host share nothing"


def test_the_flags_of_torch_2_11_are_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def older() -> argparse.ArgumentParser:
        found = get_args_parser()
        found.set_defaults(master_port=29500)
        given = [a for a in found._actions if a.dest == "shutdown_timeout"]
        for action in given:
            found._remove_action(action)
            for text in action.option_strings:
                del found._option_string_actions[text]
        return found

    monkeypatch.setattr(launch_flags, "get_args_parser", older)
    launch = parse(["--exit-report-dir", str(tmp_path), _SCRIPT])
    assert launch.config.rdzv_endpoint == "localhost:0", "not a port that other runs use too"
    assert launch.options.shutdown_timeout == 30
    words = ["--shutdown-timeout", "20", "--exit-report-dir", str(tmp_path), _SCRIPT]
    assert parse(words).options.shutdown_timeout == 20


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--nnodes 3:2", "--nnodes 3:2: give N, or MIN:MAX"),
        ("--nnodes x", "--nnodes x: give N, or MIN:MAX"),
        ("--nproc-per-node 0", "--nproc-per-node 0: at least 1 is needed"),
        ("--nproc-per-node many", "nproc_per_node"),
        ("--rdzv-backend etcd", "--rdzv-backend etcd: the supervisor needs c10d"),
        ("--nnodes 2 --rdzv-backend c10d", "give --rdzv-endpoint HOST:PORT"),
        ("--standalone --nnodes 2", "--standalone is for one node"),
        ("--no-python --module", "--no-python --module: a module needs Python"),
        ("--max-restarts -1", "--max-restarts -1: at least 0 is needed"),
        ("--exit-report-dir /dev/null/x", "Not a directory"),
        ("--nnodes 2 --rdzv-backend c10d --rdzv-endpoint host:x", "port number"),
        ("--rdzv-conf join_timeout=soon", "join_timeout"),
        ("--rdzv-conf join_timeout=0", "--rdzv-conf join_timeout=0: at least 1 is needed"),
        ("--rdzv-conf is_host=perhaps", "is_host"),
        ("no/such.py", "no/such.py: there is no such file; give the training script"),
        ("/dev", "/dev: is not a file; give the training script"),
    ],
)
def test_a_wrong_flag_is_one_message_and_exit_status_2(
    flags: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match=message):
        parse([*flags.split(), _SCRIPT])
    assert launch.main([*flags.split(), _SCRIPT]) == 2
    assert message in capsys.readouterr().err


def test_all_problems_are_reported_together(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        parse(["--nnodes", "0", "--max-restarts", "-1", _SCRIPT])
    assert len(error.value.problems) == 2


def test_the_last_value_of_a_flag_counts() -> None:
    assert value_of(["--save", "a", "--save=b", "--lr", "1"], "--save") == "b"
    assert value_of(["--lr", "1"], "--save") is None


def test_a_restarted_run_resumes_from_its_own_checkpoints() -> None:
    script = ("train.py", "--save", "c")
    assert restart_flags(script, History()) == [], "the first start is as the user asked"
    assert restart_flags(script, History(attempts=1)) == ["--load", "c"]
    history = History(attempts=2, saved_iteration=4, ckpt_step=2)
    assert restart_flags((*script, "--load", "c"), history) == [
        *("--exit-on-missing-checkpoint", "--ckpt-step", "2")
    ]
    assert restart_flags(("other.py",), history) == [], "a script without checkpoints"


def test_the_checkpoint_before_the_loaded_one_is_found(tmp_path: Path) -> None:
    folders = {step: publish_model(tmp_path, step) for step in (2, 4, 3)}  # 3 after going back
    assert older_checkpoint(str(folders[3])) == 4
    assert older_checkpoint(str(folders[2])) is None
    assert older_checkpoint(str(tmp_path / "iter_0000009")) is None, "it is gone"


def test_the_memory_of_killed_runs_is_deleted_at_the_next_start(tmp_path: Path) -> None:
    names = ("dead", "alive", "resumable", "old", "starting", "rank alive")
    folders = {name: tmp_path / f"megatron-{os.getuid()}-{name}" for name in names}
    for name, folder in folders.items():
        (folder / "heartbeats").mkdir(parents=True)
        if name != "starting":
            (folder / "lock").touch()
    for name in ("resumable", "old", "rank alive"):
        (folders[name] / "memory").mkdir()
        (folders[name] / "memory/lock").touch()
    for name in ("old", "rank alive"):
        for path in (folders[name], *folders[name].rglob("*")):
            os.utime(path, (0, 0))
    (tmp_path / f"megatron-{os.getuid() + 1}-other").mkdir()
    other_name = f"megatron-{os.getuid()}-link"
    (tmp_path / other_name).symlink_to(tmp_path / f"megatron-{os.getuid() + 1}-other")
    mine = tmp_path / f"megatron-{os.getuid()}-mine"
    with ExitStack() as held:
        for lock in (folders["alive"] / "lock", folders["rank alive"] / "memory/lock"):
            fcntl.flock(held.enter_context(lock.open()), fcntl.LOCK_SH)
        held.enter_context(lock_folder(mine))
        kept = {path.name.removeprefix(f"megatron-{os.getuid()}-") for path in tmp_path.iterdir()}
    others = {"link", f"megatron-{os.getuid() + 1}-other"}
    assert kept == {"alive", "resumable", "starting", "rank alive", "mine", *others}


def test_the_largest_number_of_nodes_that_the_flags_allow_trains() -> None:
    def refusal(world_size: int) -> str | None:
        return None if 512 % (world_size // 2) == 0 else f"512 / {world_size // 2} does not divide"

    assert nodes_that_fit(4, 2, 8, refusal) == 4
    assert nodes_that_fit(3, 2, 8, refusal) == 2
    with pytest.raises(ConfigError, match=r"3 nodes with 8 ranks each .*\n512 / 12 does not"):
        nodes_that_fit(3, 3, 8, refusal)

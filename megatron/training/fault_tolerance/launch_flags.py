"""Command line of the supervisor: all flags of torchrun, and its own.

A flag of torchrun keeps its meaning, with these differences: --max-restarts defaults to 100, the
backend ``static`` (--master-addr, --master-port, --node-rank) becomes c10d at the same address, so
that nodes can come and go, and --run-path starts the script as --no-run-path does.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import socket
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import config_from_args, get_args_parser, parse_min_max_nnodes

from megatron.core.config.errors import ConfigError
from megatron.training.fault_tolerance.rendezvous import check_parameters
from megatron.training.fault_tolerance.restart_policy import Options
from megatron.training.process.shared_memory import SHARED_MEMORY

_PORT = 29500
# torch's agent handles these; `StopSignals` handles the others.
_ENDING_SIGNALS = "SIGHUP,SIGQUIT"
# Flag of a field of `Options` -> help.
_NUMBERS = {
    "--max-no-progress-restarts": (
        "stop after N restarts without a new checkpoint or --min-progress-iterations steps"
    ),
    "--min-progress-iterations": (
        "number of new steps that count as progress without a new checkpoint"
    ),
    "--restart-backoff": (
        "pause before a restart; it doubles with each restart without progress, up to 60"
    ),
    "--peer-timeout": (
        "time for the ranks of a node to end by themselves after another rank has failed"
    ),
    "--node-timeout": "time without a sign of life after which a node counts as lost",
}


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Everything that the supervisor needs; ``script`` is the command line of a rank."""

    config: LaunchConfig
    program: str
    script: tuple[str, ...]
    options: Options
    node: str
    folder: Path
    signals: tuple[str, ...]
    check_node: bool
    detects_hangs: bool

    @property
    def memory(self) -> Path:
        """Folder of this run and node in shared memory."""
        name = f"megatron-{os.getuid()}-{self.config.run_id}-{self.node}"
        return SHARED_MEMORY / re.sub(r"[^\w.-]", "_", name)


def parser() -> argparse.ArgumentParser:
    """Return torchrun's parser with the flags of the supervisor."""
    found = get_args_parser()
    found.prog = "tools/launch.py"
    found.description = "Start the ranks of a run as torchrun does, and restart the run."
    _add_own_flags(found.add_argument_group("supervisor"))
    # torch 2.11 has a --master-port that all runs on a host would share.
    port = os.environ.get("PET_MASTER_PORT")
    found.set_defaults(max_restarts=Options.max_restarts, shutdown_timeout=None, master_port=port)
    return found


def parse(
    argv: Sequence[str], named_script: Callable[[Sequence[str]], Sequence[str]] = list
) -> Launch:
    """Return the parsed command line.  Raises ConfigError that lists every problem.

    ``named_script`` returns the script, with its arguments, for one that a name stands for.
    """
    given = vars(parser().parse_args(argv))
    if not (given["module"] or given["no_python"]):
        words = given["training_script"], *given["training_script_args"]
        given["training_script"], *given["training_script_args"] = named_script(words)
    ConfigError.raise_for(_problems(given))
    given |= _rendezvous(given)
    if given["shutdown_timeout"] is None:
        given["shutdown_timeout"] = int(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30"))
    folder = given["exit_report_dir"] or given["log_dir"]
    folder = Path(folder or tempfile.mkdtemp(prefix="megatron-launch-")).resolve()
    given |= {"signals": given["signals_to_handle"], "signals_to_handle": _ENDING_SIGNALS}
    given |= {"log_dir": given["log_dir"] or str(folder), "run_path": False}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        config, program, script = config_from_args(argparse.Namespace(**given))
        interval_s = max(1, int(given["node_timeout"] / 3))
        signs = {
            "keep_alive_interval": interval_s,
            "keep_alive_max_attempt": math.ceil(max(1.0, given["node_timeout"]) / interval_s),
        }
        config = replace(config, rdzv_configs={**signs, **config.rdzv_configs})
        check_parameters(config)
    except (OSError, ValueError, AssertionError, RuntimeError) as error:
        raise ConfigError(f"tools/launch.py: {error}") from None
    assert isinstance(program, str), "--run-path was switched off"
    return Launch(
        config=config,
        program=program,
        script=tuple(script),
        options=Options(**{field.name: given[field.name] for field in fields(Options)}),
        node=given["node_name"] or socket.gethostname(),
        folder=folder,
        signals=tuple(given["signals"].split(",")),
        check_node=given["check_node"],
        detects_hangs=not given["no_hang_detection"],
    )


def value_of(script: Sequence[str], flag: str) -> str | None:
    """Return the last value of ``flag`` in the command line of a rank, None if it is not given."""
    found = None
    for word, following in zip(script, (*script[1:], None), strict=True):
        if word == flag:
            found = following
        elif word.startswith(f"{flag}="):
            found = word.partition("=")[2]
    return found


def _add_own_flags(group: argparse._ActionsContainer) -> None:
    add = group.add_argument
    if "shutdown_timeout" not in vars(get_args_parser().parse_args(["script"])):  # torch 2.11
        add(
            "--shutdown-timeout",
            "--shutdown_timeout",
            type=int,
            metavar="SECONDS",
            help="time for ranks to end before they are killed; default: 30",
        )
    for flag, text in _NUMBERS.items():
        default = getattr(Options, _dest(flag))
        unit = "N" if isinstance(default, int) else "SECONDS"
        add(flag, type=type(default), default=default, metavar=unit, help=text)
    add(
        "--exit-report-dir",
        type=Path,
        metavar="DIR",
        help="folder of exit.json and of the exit reports of each attempt; default: --log-dir",
    )
    add("--node-name", default=None, help="name of this node; default: its host name")
    add("--no-hang-detection", action="store_true", help="do not watch the heartbeats of the ranks")
    add(
        "--check-node",
        action="store_true",
        help="run tools/check_node.py before the first attempt and after a node is blamed",
    )


def _dest(flag: str) -> str:
    return flag[2:].replace("-", "_")


def _rendezvous(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flags of the c10d rendezvous that stands for the requested one."""
    _, max_nodes = parse_min_max_nnodes(given["nnodes"])
    endpoint = given["rdzv_endpoint"]
    port = given["master_port"]
    found: dict[str, Any] = {"rdzv_backend": "c10d"}
    if given["standalone"] or (max_nodes == 1 and not endpoint and port is None):
        return {**found, "rdzv_endpoint": "localhost:0", "rdzv_id": uuid.uuid4().hex[:8]}
    if given["rdzv_backend"] == "static":
        endpoint = endpoint or f"{given['master_addr']}:{port or _PORT}"
        is_host = f"is_host={str(int(given['node_rank']) == 0).lower()}"
        found["rdzv_conf"] = ",".join(filter(None, (given["rdzv_conf"], is_host)))
    found["rdzv_endpoint"] = endpoint
    if given["rdzv_id"] == "none":  # torchrun's default: jobs on one host would share folders
        found["rdzv_id"] = re.sub(r"\W", "_", endpoint)
    return found


def _problems(given: Mapping[str, Any]) -> Iterator[str]:
    nodes = given["nnodes"]
    ranks = given["nproc_per_node"]
    try:
        least, most = parse_min_max_nnodes(nodes)
    except (ValueError, RuntimeError):
        least = 0
        most = 0
    if not 0 < least <= most:
        yield f"--nnodes {nodes}: give N, or MIN:MAX with 1 <= MIN <= MAX"
    if ranks.lstrip("-").isdigit() and int(ranks) < 1:  # torch checks words
        yield f"--nproc-per-node {ranks}: at least 1 is needed"
    if given["rdzv_backend"] not in ("c10d", "static"):
        yield f"--rdzv-backend {given['rdzv_backend']}: the supervisor needs c10d"
    elif most > 1 and given["rdzv_backend"] == "c10d" and not given["rdzv_endpoint"]:
        yield f"--nnodes {nodes} --rdzv-backend c10d: give --rdzv-endpoint HOST:PORT"
    for flag in ("--max-restarts", *_NUMBERS):
        if (value := given[_dest(flag)]) < 0:
            yield f"{flag} {value}: at least 0 is needed"
    if given["standalone"] and most > 1:
        yield f"--standalone --nnodes {nodes}: --standalone is for one node; remove one of them"
    if given["no_python"] and given["module"]:
        yield "--no-python --module: a module needs Python; remove one of them"
    script = Path(given["training_script"])
    if not (given["module"] or given["no_python"] or script.is_file()):
        what = "is not a file" if script.exists() else "there is no such file"
        yield f"{script}: {what}; give the training script after the flags of tools/launch.py"

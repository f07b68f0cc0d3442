"""Start a training script on several ranks, as torchrun does, and restart it after failures.

    tools/launch.py --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 2 ...
    tools/launch.py --nproc-per-node 8 gpt --tensor-model-parallel-size 2 ...
    tools/launch.py --nproc-per-node 8 --config run.yaml ...

Takes all flags of torchrun; docs/fault_tolerance.md describes the others.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # installed or not

from megatron.core.config.errors import MegatronError
from megatron.training.fault_tolerance.launch_flags import Launch, parse, parser, value_of
from megatron.training.fault_tolerance.supervisor import Supervisor
from megatron_commands import command_line

_CHECK_NODE = str(Path(__file__).resolve().parent / "check_node.py")
_UNHEALTHY = 1
_FAULTS = "FAULTS"  # injected faults: those of the ranks are not for --check-only


def main(argv: Sequence[str] | None = None) -> int:
    """Run until the run ends; return its exit status."""
    try:
        launch = parse(named(sys.argv[1:] if argv is None else argv), command_line)
    except MegatronError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    return Supervisor(launch, run_program, lambda restarts: node_problem(launch, restarts)).run()


def named(words: Sequence[str]) -> list[str]:
    """Return ``words`` with the program that the file of --config names, if they have no script."""
    at = next((i for i, word in enumerate(words) if word.partition("=")[0] == "--config"), None)
    script = None if at is None else parser().parse_known_args([*words[:at], ""])[0].training_script
    return [*words] if script != "" else [*words[:at], *command_line(words[at:])]


def run_program(command: Sequence[str], **variables: str) -> tuple[int, str]:
    """Run a program as a single process; return its exit status and output.

    ``variables`` are added to its environment; of this process it does not inherit FAULTS.
    """
    environ = {name: value for name, value in os.environ.items() if name != _FAULTS}
    done = subprocess.run(command, capture_output=True, text=True, env=environ | variables)
    return done.returncode, done.stdout + done.stderr


def node_problem(launch: Launch, restarts: int) -> str | None:
    """Return the report of tools/check_node.py if this node is unhealthy, else None.

    ``restarts``: number of restarts of the run, for injected faults.
    """
    command = [sys.executable]
    if launch.config.nproc_per_node > 1:
        command += ["-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(launch.config.nproc_per_node)]
    command.append(_CHECK_NODE)
    folder = value_of(launch.script, "--save")
    if folder is not None and Path(folder).is_dir():
        command += ["--folder", folder]
    if (device := value_of(launch.script, "--device")) is not None:
        command += ["--device", device]
    faults = {_FAULTS: os.environ.get(_FAULTS, ""), "TORCHELASTIC_RESTART_COUNT": str(restarts)}
    code, output = run_program(command, **faults)
    return output if code == _UNHEALTHY else None


if __name__ == "__main__":
    sys.exit(main())

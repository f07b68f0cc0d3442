"""Start a training script on several ranks, as torchrun does, and restart it after failures.

    tools/launch.py --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 2 ...

Takes all flags of torchrun; docs/fault_tolerance.md describes the others.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # installed or not

from megatron.core.config.errors import MegatronError
from megatron.training.supervisor.command_line import parse
from megatron.training.supervisor.node import Supervisor


def main(argv: Sequence[str] | None = None) -> int:
    """Run until the run ends; return its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        launch = parse(words)
    except MegatronError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    return Supervisor(launch, run_program).run()


def run_program(command: Sequence[str]) -> tuple[int, str]:
    """Run a program as a single process; return its exit status and output."""
    done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


if __name__ == "__main__":
    sys.exit(main())

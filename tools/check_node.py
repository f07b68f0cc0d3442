"""Check a node before a run: matmuls, GPU health, and the disk of the checkpoints.

    python tools/check_node.py --folder CHECKPOINTS
    torchrun --nnodes 16 --nproc-per-node 8 ... tools/check_node.py --folder CHECKPOINTS

Each rank checks its own device, the first rank of a node also the disk.  No rank waits for another.
Exit status of a rank: 0 healthy, 1 unhealthy, 2 wrong arguments.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # installed or not

from megatron.core import device
from megatron.core.config.errors import ConfigError
from megatron.core.diagnostics.fault_injection import check_faults
from megatron.training.process.rank_print import rank
from tools.lib import node_checks


def arguments() -> argparse.Namespace:
    """Parse the command line; ends the program with status 2 if it is wrong."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--folder", type=Path, help="Folder of checkpoints, to check its disk.")
    parser.add_argument("--disk-mib", type=int, default=64, help="Size of the test file.")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--limit-s", type=float, default=60.0, help="Time limit of each check in seconds."
    )
    args = parser.parse_args()
    if args.limit_s <= 0 or args.disk_mib <= 0:
        parser.error("--limit-s and --disk-mib must be positive")
    return args


def main() -> None:
    """Check and print; end the process without waiting for a check that hangs."""
    args = arguments()
    try:
        status = int(not is_healthy(args))
    except ConfigError as error:
        print(error, file=sys.stderr)
        status = 2
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def is_healthy(args: argparse.Namespace) -> bool:
    """Run the checks of this rank, print a line for each that fails.  Raises ConfigError."""
    check_faults()
    if args.folder is not None and not args.folder.is_dir():
        raise ConfigError(f"--folder {args.folder}: it is not a folder on this host")
    try:
        device.choose(args.device, int(os.environ.get("LOCAL_RANK") or 0))
    except ValueError as error:
        raise ConfigError(str(error)) from None
    checks = {"matmul": node_checks.matmul, "GPU": node_checks.gpu_health}
    if args.folder is not None and os.environ.get("LOCAL_RANK", "0") == "0":
        checks["disk"] = partial(node_checks.disk, args.folder, args.disk_mib)
    found = {name: node_checks.problem_of(check, args.limit_s) for name, check in checks.items()}
    me = f"{platform.node()}, rank {rank()}"
    problems = [f"{me}: {name}: {why}\n" for name, why in found.items() if why is not None]
    print("".join(problems) or f"{me}: healthy\n", end="", flush=True)  # one write: others print
    return not problems


if __name__ == "__main__":
    main()

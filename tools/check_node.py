"""Check nodes before a run: matmuls, memory, collectives, disk, clock and GPU health.

    python tools/check_node.py --folder CHECKPOINTS
    torchrun --nnodes 16 --nproc-per-node 8 ... tools/check_node.py --folder CHECKPOINTS

With several ranks, nodes are also compared with each other.  Prints one table and the nodes that
are slow or wrong.  Exit status: 0 healthy, 1 a node is unhealthy (on ranks of healthy nodes: 0,
except on rank 0), 2 wrong arguments.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # installed or not

import torch.distributed as dist

from megatron.core import device
from megatron.core.config.errors import ConfigError, LaunchError
from megatron.core.diagnostics.collective_tracer import note_collectives
from megatron.core.diagnostics.fault_injection import check_faults
from megatron.training.fault_tolerance import node_checks
from megatron.training.fault_tolerance.node_checks import Finding, RankResult, Thresholds
from megatron.training.process.rank_print import rank, world_size
from megatron.training.process.rendezvous import meet

_SHARE = 0.8  # of the limit of a check: then a collective times out
_POLL_S = 0.05


def arguments() -> argparse.Namespace:
    """Parse the command line; ends the program with status 2 if it is wrong."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--folder", type=Path, help="Folder of checkpoints, to measure its disk.")
    parser.add_argument("--disk-mib", type=int, default=64, help="Size of the test file.")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--limit-s", type=float, default=60.0, help="Time limit of each check in seconds."
    )
    parser.add_argument(
        "--slow-below",
        type=float,
        default=Thresholds.slow_below,
        help="A rate is slow below this share of the rate of like devices, or of the expected one.",
    )
    parser.add_argument("--expect", type=Path, help="File of --save-expectations to compare with.")
    parser.add_argument("--save-expectations", type=Path, help="Write the typical rates to a file.")
    parser.add_argument("--json", action="store_true", help="Print JSON instead of the table.")
    args = parser.parse_args()
    if not 0 < args.slow_below < 1:
        parser.error(f"--slow-below {args.slow_below}: it must lie between 0 and 1")
    if args.limit_s <= 0 or args.disk_mib <= 0:
        parser.error("--limit-s and --disk-mib must be positive")
    return args


def main() -> None:
    """Measure, compare, print; end the process without waiting for a check that hangs."""
    args = arguments()
    try:
        status = check(args)
    except ConfigError as error:
        print(error, file=sys.stderr)
        status = 2
    except LaunchError as error:  # a rank is missing: its node is unhealthy
        print(error, file=sys.stderr)
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def check(args: argparse.Namespace) -> int:
    """Return the exit status.  Collective over all ranks.  Raises ConfigError or LaunchError."""
    check_faults()
    expected = {} if args.expect is None else node_checks.read_expectations(args.expect)
    if args.folder is not None and not args.folder.is_dir():
        raise ConfigError(f"--folder {args.folder}: it is not a folder on this host")
    try:
        device.choose(args.device, int(os.environ.get("LOCAL_RANK") or 0))
    except ValueError as error:
        raise ConfigError(str(error)) from None
    ranks = world_size()
    store = meet(rank(), ranks, timedelta(seconds=args.limit_s)) if ranks > 1 else dist.HashStore()
    nodes = node_names(gather(store, "node", node_of_this_process(), ranks, args.limit_s))
    fields, problems = measure(args, store, nodes)
    mine = RankResult(
        rank=rank(),
        node=nodes[rank()] or "unknown",
        device=node_checks.device_name(),
        bits=fields.pop("bits", ""),
        clock_offset_s=fields.pop("clock_offset_s", 0.0),
        rates=fields,
        problems=problems,
    )
    results = collect(store, mine, nodes, args.limit_s)
    found = node_checks.findings(results, expected, Thresholds(slow_below=args.slow_below))
    if rank() != 0:
        store.add("read", 1)
        return int(any(finding.node == mine.node for finding in found))
    report(args, results, found)
    deadline_s = time.monotonic() + args.limit_s / 10  # this process may serve the store
    while store.add("read", 0) < ranks - 1 and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)
    return int(bool(found))


def measure(
    args: argparse.Namespace, store: dist.Store, nodes: Sequence[str | None]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the measured values of this rank, and the problems of checks that failed."""
    checks: list[tuple[str, node_checks.Check]] = [
        ("matmul", node_checks.matmul),
        ("memory", node_checks.memory),
        ("GPU", node_checks.gpu_health),
    ]
    if args.folder is not None and os.environ.get("LOCAL_RANK", "0") == "0":
        size = args.disk_mib * 2**20
        checks.append(("disk", partial(node_checks.disk, args.folder, size)))
    values: dict[str, Any] = {}
    problems: dict[str, str] = {}
    for name, function in checks:
        _run(name, function, args.limit_s, values, problems)
    if len(nodes) > 1:
        gather(store, "local checks", "done", len(nodes), 5 * args.limit_s)
        timeout = timedelta(seconds=_SHARE * args.limit_s)
        backend = device.default_backend()
        dist.init_process_group(
            backend, store=store, rank=rank(), world_size=len(nodes), timeout=timeout
        )
        note_collectives()
        groups = node_checks.Groups([name or "unknown" for name in nodes], timeout.total_seconds())
        several = [
            ("all-reduce", groups.all_reduce),
            ("link", groups.links),
            ("clock", groups.clock),
        ]
        for name, function in several:
            _run(name, function, args.limit_s, values, problems)
            failed = gather(store, name, problems.get(name, ""), len(nodes), args.limit_s)
            if any(problem != "" for problem in failed):
                break  # a collective that has failed breaks later ones on healthy ranks, too
    return values, problems


def _run(
    name: str,
    function: node_checks.Check,
    limit_s: float,
    values: dict[str, Any],
    problems: dict[str, str],
) -> None:
    found, problem = node_checks.run_within(limit_s, name, function)
    values.update(found)
    if problem is not None:
        problems[name] = problem


def collect(
    store: dist.Store, mine: RankResult, nodes: Sequence[str | None], limit_s: float
) -> list[RankResult]:
    """Return the results of all ranks; a rank that sends none within the limit has a problem."""
    limit_s *= 3
    problem = {"report": f"no report within {limit_s:.0f} s"}
    texts = gather(store, "result", json.dumps(asdict(mine)), len(nodes), limit_s)
    return [
        RankResult(rank=other, node=node or "unknown", device=mine.device, problems=problem)
        if text is None
        else RankResult(**json.loads(text))
        for other, (node, text) in enumerate(zip(nodes, texts, strict=True))
    ]


def report(
    args: argparse.Namespace, results: Sequence[RankResult], found: Sequence[Finding]
) -> None:
    """Print the table or JSON, and save the expectations."""
    if args.json:
        print(node_checks.as_json(results, found))
    else:
        print("\n".join((*node_checks.table(results), *map(str, found))))
        nodes = {result.node for result in results}
        unhealthy = {finding.node for finding in found}
        verdict = f"unhealthy: {', '.join(sorted(unhealthy))}" if unhealthy else "all healthy"
        print(f"{len(nodes)} {'nodes' if len(nodes) > 1 else 'node'}, {verdict}")
    if args.save_expectations is not None:
        stored = node_checks.expectations(results)
        args.save_expectations.write_text(json.dumps(stored, indent=1))


def node_of_this_process() -> str:
    """Return host and number of the launcher that has started this process."""
    return f"{platform.node()} {os.environ.get('GROUP_RANK', '0')}"


def node_names(places: Sequence[str | None]) -> list[str | None]:
    """Return the host of each rank, with the launcher's number where a host has several."""
    hosts = [None if place is None else place.split()[0] for place in places]
    crowded = {h for h in hosts if len({p for p in places if p and p.split()[0] == h}) > 1}
    return [
        place.replace(" ", "/") if place and host in crowded else host
        for place, host in zip(places, hosts, strict=True)
    ]


def gather(
    store: dist.Store, name: str, value: str, ranks: int, limit_s: float
) -> list[str | None]:
    """Return the value of each rank; None for one that sends none within the limit."""
    store.set(f"{name}/{rank()}", value)
    deadline_s = time.monotonic() + limit_s
    return [
        wait_for(store, f"{name}/{other}", max(0.0, deadline_s - time.monotonic()))
        for other in range(ranks)
    ]


def wait_for(store: dist.Store, key: str, limit_s: float) -> str | None:
    """Return the value of ``key``, or None if nobody sets it within the limit."""
    deadline_s = time.monotonic() + limit_s
    while not store.check([key]):
        if time.monotonic() > deadline_s:
            return None
        time.sleep(_POLL_S)
    return store.get(key).decode()


if __name__ == "__main__":
    main()

"""Measurements of a node before a run (tools/check_node.py), each in bounded time.

A check runs in a thread of its own: if a disk or a collective hangs, the rank reports that and goes
on.  Order of collectives on every rank: the groups of the nodes, then per check (`COLLECTIVE`):
all-reduces in the node; one of all ranks, then transfers between neighbouring nodes; three times
barrier and all-gather for the clock.

`findings` compares the measurements of ranks with like devices and with stored expectations.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import platform
import re
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.core import device
from megatron.core.config.errors import ConfigError
from megatron.core.diagnostics import collective_tracer
from megatron.core.diagnostics.fault_injection import fault_point, flip_bit
from megatron.core.optional import available, require
from megatron.core.parallel.collectives import values_of_ranks, wait_for_ranks

Check = Callable[[], dict[str, Any]]  # returns fields of RankResult; rates under their own names
_REPEATS = 4  # of a measurement; the fastest counts
_ROUNDS = 3  # of the fixed computation, which must agree
_MIB = 2**20
_FAILURES = (RuntimeError, OSError, ArithmeticError, ValueError)
# Names of checks in which ranks communicate.
COLLECTIVE = ("all-reduce", "link", "clock")
# Rate -> unit.  Larger is better.
RATES = {
    "matmul": "TFLOP/s",
    "memory": "GB/s",
    "all-reduce in the node": "GB/s",
    "link to other nodes": "GB/s",
    "disk write": "MB/s",
    "disk read": "MB/s",
}
_SHARED = ("disk write", "disk read")  # others use the disk too: half the threshold applies


@dataclass(frozen=True, kw_only=True)
class RankResult:
    """Measurements of one rank; a check that failed is in ``problems`` instead."""

    rank: int
    node: str
    device: str
    rates: dict[str, float] = field(default_factory=dict)
    bits: str = ""  # hash of the results of fixed computations
    clock_offset_s: float = 0.0  # to rank 0
    problems: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, order=True)
class Finding:
    """Reason why a node is unhealthy."""

    node: str
    rank: int
    check: str
    text: str

    def __str__(self) -> str:
        return f"{self.node}, rank {self.rank}: {self.check}: {self.text}"


@dataclass(frozen=True)
class Thresholds:
    """Limits of what counts as healthy."""

    slow_below: float = 0.7  # share of the rate of like devices
    clock_offset_s: float = 1.0


def run_within(limit_s: float, name: str, check: Check) -> tuple[dict[str, Any], str | None]:
    """Return the result of ``check``, and a problem if it fails or takes longer than ``limit_s``.

    A check that hangs stays in its thread: end the process with ``os._exit``.
    """
    result: dict[str, Any] = {}
    problem = f"no result within {limit_s:.0f} s"

    def run() -> None:
        nonlocal problem
        device.use_in_this_thread()
        try:
            result.update(check())
            problem = ""
        except _FAILURES as error:
            problem = f"{type(error).__name__}: {str(error).splitlines()[0]}"

    thread = threading.Thread(target=run, name=f"check {name}", daemon=True)
    thread.start()
    thread.join(limit_s)
    if problem and name in COLLECTIVE:
        problem += f" ({collective_tracer.record})"
    return ({}, problem) if problem else (result, None)


def matmul() -> dict[str, Any]:
    """Return the rate of matmuls, and a hash of a fixed computation that must not change.

    Raises ArithmeticError if its rounds differ on this device.
    """
    size = 4096 if device.is_cuda() else 512
    dtype = torch.bfloat16 if device.is_cuda() else torch.float32
    numbers = torch.arange(size * size, dtype=torch.int64) * 2654435761 % 1000003
    values = numbers.double() / 1000003 - 0.5  # the same on every machine
    fixed = values.view(size, size).to(device.current(), dtype)
    hashes = set()
    for _ in range(_ROUNDS):
        product = fixed
        for _ in range(3):
            product = (product @ fixed) / math.sqrt(size)
        data = product.float().cpu().numpy().tobytes()
        if fault_point("check.matmul") == "bitflip":
            data = flip_bit(data)
        hashes.add(hashlib.sha256(data).hexdigest()[:16])
    if len(hashes) > 1:
        raise ArithmeticError("equal computations give different bits: the device is faulty")
    calls = 20

    def run() -> None:
        fault_point("check.matmul")
        for _ in range(calls):
            torch.mm(fixed, fixed)

    return {"matmul": calls * 2 * size**3 / _fastest_s(run) / 1e12, "bits": hashes.pop()}


def memory() -> dict[str, Any]:
    """Return the bandwidth of copies in device memory, read and written bytes together."""
    size = (1024 if device.is_cuda() else 64) * _MIB
    source = torch.ones(size, dtype=torch.uint8, device=device.current())
    target = torch.empty_like(source)

    def run() -> None:
        fault_point("check.memory")
        target.copy_(source)

    return {"memory": 2 * size / _fastest_s(run) / 1e9}


def disk(folder: Path, size: int) -> dict[str, Any]:
    """Return the rates of writing (with fsync) and reading a file in ``folder``.

    Raises OSError, also if the file has other bytes than were written.
    """
    data = os.urandom(min(size, _MIB)) * max(1, size // _MIB)
    path = folder / f".check_node.{platform.node()}.{os.getpid()}"
    try:
        began_s = time.perf_counter()
        is_flipped = fault_point("check.disk") == "bitflip"
        with open(path, "wb") as file:
            file.write(flip_bit(data) if is_flipped else data)
            file.flush()
            os.fsync(file.fileno())
            with contextlib.suppress(OSError):  # read from the disk, not from memory
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        written_s = time.perf_counter()
        found = path.read_bytes()
        ended_s = time.perf_counter()
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
    if found != data:
        raise OSError(f"{folder} returns other bytes than were written")
    megabytes = len(data) / 1e6
    return {
        "disk write": megabytes / (written_s - began_s),
        "disk read": megabytes / (ended_s - written_s),
    }


def gpu_health() -> dict[str, Any]:
    """Raise RuntimeError if NVML reports a fault of this rank's GPU."""
    if not device.is_cuda() or not available("pynvml"):
        return {}
    nvml: Any = require("pynvml", "check_node")
    nvml.nvmlInit()
    handle = nvml.nvmlDeviceGetHandleByUUID(device.uuid())
    if reasons := list(_gpu_faults(nvml, handle)):
        raise RuntimeError("; ".join(reasons))
    return {}


def _gpu_faults(nvml: Any, handle: Any) -> list[str]:
    def read(quantity: str, *arguments: int) -> Any:
        try:
            return getattr(nvml, f"nvmlDeviceGet{quantity}")(handle, *arguments)
        except nvml.NVMLError_NotSupported:
            return 0

    uncorrected = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
    volatile = nvml.NVML_VOLATILE_ECC
    slowdown = (
        nvml.nvmlClocksThrottleReasonHwSlowdown
        | nvml.nvmlClocksThrottleReasonHwThermalSlowdown
        | nvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown
    )
    faults = []
    if errors := read("TotalEccErrors", uncorrected, volatile):
        faults.append(f"{errors} uncorrected memory errors since the start of the driver")
    rows = read("RemappedRows")
    if rows and (rows[2] or rows[3]):
        faults.append("memory rows wait for a reset to be remapped, or cannot be remapped")
    if read("CurrentClocksThrottleReasons") & slowdown:
        faults.append("the hardware slows the clock down (temperature or power)")
    return faults


class Groups:
    """Process groups of the check.  Collective over all ranks when created."""

    def __init__(self, nodes: Sequence[str], limit_s: float) -> None:
        """``nodes`` has the node of each rank."""
        self.rank = dist.get_rank()
        names = list(dict.fromkeys(nodes))
        members = [[r for r, node in enumerate(nodes) if node == name] for name in names]
        timeout = timedelta(seconds=limit_s)
        groups = [dist.new_group(ranks, timeout=timeout) for ranks in members]
        self.node = names.index(nodes[self.rank])
        self.own, self.size = groups[self.node], len(members[self.node])
        self.leaders = [ranks[0] for ranks in members]

    def all_reduce(self) -> dict[str, Any]:
        """Return the bus bandwidth of an all-reduce of the node's ranks."""
        if self.size == 1:
            return {}
        values = torch.ones((64 if device.is_cuda() else 4) * _MIB, device=device.current())

        def run() -> None:
            fault_point("check.collective")
            values.fill_(1)
            dist.all_reduce(values, group=self.own)

        seconds = _fastest_s(run)
        if not bool((values == self.size).all()):
            raise ArithmeticError("an all-reduce in the node gives a wrong sum")
        num_bytes = 2 * (self.size - 1) / self.size * values.numel() * values.element_size()
        return {"all-reduce in the node": num_bytes / seconds / 1e9}

    def links(self) -> dict[str, Any]:
        """Return the faster of the rates to the two neighbouring nodes, on one rank of each node.

        A slow node is slow to both, its neighbours only to one.
        """
        # NCCL creates the communicator of all ranks in their first operation, which all must make.
        dist.all_reduce(torch.zeros(1, device=device.current()))
        count = len(self.leaders)
        if count == 1 or self.rank not in self.leaders:
            return {}
        sent = torch.ones((64 if device.is_cuda() else 4) * _MIB, device=device.current())
        received = torch.empty_like(sent)

        def run(peer: int) -> None:
            fault_point("check.collective")
            operations = (
                dist.P2POp(dist.isend, sent, peer),
                dist.P2POp(dist.irecv, received, peer),
            )
            for work in dist.batch_isend_irecv(list(operations)):
                work.wait()

        seconds = []
        for phase in range(3):
            for pair in [(i, (i + 1) % count) for i in range(count) if _phase(i, count) == phase]:
                if self.node in pair:
                    peer = self.leaders[pair[1] if pair[0] == self.node else pair[0]]
                    seconds.append(_fastest_s(partial(run, peer)))
        num_bytes = 2 * sent.numel() * sent.element_size()  # sent and received
        return {"link to other nodes": num_bytes / min(seconds) / 1e9}

    def clock(self) -> dict[str, Any]:
        """Return the offset of the host's clock to that of rank 0, within the time of a barrier."""
        offsets = []
        for _ in range(3):
            wait_for_ranks()
            now_s = time.time()
            offsets.append(now_s - values_of_ranks([now_s])[0][0])
        return {"clock_offset_s": min(offsets, key=abs)}


def device_name() -> str:
    """Return a name that devices have in common whose results are equal by bits."""
    if device.is_cuda():
        return device.name()
    cpus = Path("/proc/cpuinfo")
    found = re.search("model name.*: (.*)", cpus.read_text()) if cpus.exists() else None
    model = found[1] if found else platform.processor() or platform.machine()
    return f"{model}, {torch.get_num_threads()} threads"


def _fastest_s(run: Callable[[], None]) -> float:
    run()
    seconds = []
    for _ in range(_REPEATS):
        device.synchronize()
        began_s = time.perf_counter()
        run()
        device.synchronize()
        seconds.append(time.perf_counter() - began_s)
    return min(seconds)


def _phase(index: int, count: int) -> int:
    """Return when pair ``index`` of a ring exchanges, so that a node is in one pair at a time."""
    return 2 if index == count - 1 and count % 2 else index % 2


def findings(
    results: Sequence[RankResult],
    expected: Mapping[str, Mapping[str, Any]],
    thresholds: Thresholds,
) -> list[Finding]:
    """Return why nodes are unhealthy, in the order of nodes and ranks.

    ``expected`` has rates and bits by device, as `expectations` returns them.
    """
    limit_s = thresholds.clock_offset_s
    problems = [
        (result, "clock", f"{result.clock_offset_s:+.1f} s to rank 0, at most {limit_s} s")
        for result in results
        if abs(result.clock_offset_s) > limit_s
    ]
    for check in {check for result in results for check in result.problems}:
        failed = [result for result in results if check in result.problems]
        # Of a collective only the ranks that others have waited for.
        absent = [result for result in failed if "waits in" not in result.problems[check]]
        problems += [(result, check, result.problems[check]) for result in absent or failed]
    for kind, alike in _by_device(results).items():
        problems += _slow(alike, expected.get(kind, {}), thresholds.slow_below)
        problems += _wrong(alike, expected.get(kind, {}))
    return sorted(Finding(result.node, result.rank, *problem) for result, *problem in problems)


def expectations(results: Iterable[RankResult]) -> dict[str, dict[str, Any]]:
    """Return the typical rates and the bits of each device, to compare later runs with."""
    stored = {}
    for kind, alike in _by_device(results).items():
        rates = {r: _typical(alike, r) for r in RATES if any(r in one.rates for one in alike)}
        bits, count = Counter(result.bits for result in alike).most_common(1)[0]
        stored[kind] = {"rates": rates, "bits": bits if 2 * count > len(alike) else ""}
    return stored


def _by_device(results: Iterable[RankResult]) -> dict[str, list[RankResult]]:
    found: dict[str, list[RankResult]] = defaultdict(list)
    for result in results:
        found[result.device].append(result)
    return found


def read_expectations(path: Path) -> dict[str, dict[str, Any]]:
    """Return the stored expectations.  Raises ConfigError."""
    try:
        stored: dict[str, dict[str, Any]] = json.loads(path.read_text())
        is_valid = isinstance(stored, dict) and all(
            isinstance(one, dict)
            and isinstance(one.get("bits"), str)
            and isinstance(one.get("rates"), dict)
            and all(isinstance(rate, int | float) for rate in one["rates"].values())
            for one in stored.values()
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"--expect {path}: it cannot be read ({error})") from None
    if not is_valid:
        raise ConfigError(f"--expect {path}: it is no file that --save-expectations has written")
    return stored


def table(results: Sequence[RankResult]) -> Iterator[str]:
    """Yield the lines of the table of measurements."""
    shown = [rate for rate in RATES if any(rate in result.rates for result in results)]
    heads = [f"{rate} ({RATES[rate]})" for rate in shown]
    cells = [("rank", "node", "device", *heads, "clock (ms)")]
    for result in results:
        rates = [f"{result.rates[r]:.3g}" if r in result.rates else "-" for r in shown]
        clock = f"{1e3 * result.clock_offset_s:+.0f}"
        cells.append((str(result.rank), result.node, result.device, *rates, clock))
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    for row in cells:
        yield "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))


def as_json(results: Sequence[RankResult], found: Sequence[Finding]) -> str:
    """Return the report for programs."""
    unhealthy = sorted({finding.node for finding in found})
    report = {
        "healthy": not found,
        "unhealthy_nodes": unhealthy,
        "findings": [asdict(finding) for finding in found],
        "ranks": [asdict(result) for result in results],
    }
    return json.dumps(report)


def _slow(
    alike: Sequence[RankResult], expected: Mapping[str, Any], slow_below: float
) -> Iterator[tuple[RankResult, str, str]]:
    for rate, unit in RATES.items():
        share = slow_below / 2 if rate in _SHARED else slow_below
        for result in (result for result in alike if rate in result.rates):
            references = {"like devices have": _typical(alike, rate)}
            if (stored := expected.get("rates", {}).get(rate)) is not None:
                references["expected are"] = stored
            for words, reference in references.items():
                if result.rates[rate] < share * reference:
                    text = f"{words} {reference:.3g} (limit {share:.0%})"
                    yield result, rate, f"{result.rates[rate]:.3g} {unit}, {text}"
                    break


def _wrong(
    alike: Sequence[RankResult], expected: Mapping[str, Any]
) -> Iterator[tuple[RankResult, str, str]]:
    bits = Counter(result.bits for result in alike if result.bits)
    right, count = next(iter(bits.most_common(1)), ("", 0))
    words = "fixed computations give other bits than on most like devices"
    if 2 * count <= bits.total():
        words = "fixed computations give different bits on like devices, without a majority"
        right = ""
    if expected.get("bits"):
        words = "fixed computations give other bits than expected"
        right = expected["bits"]
    for result in alike:
        if result.bits not in ("", right):
            yield result, "matmul", f"{words}: its results are wrong"


def _typical(alike: Sequence[RankResult], rate: str) -> float:
    """Return the median, of an even number of ranks the upper one: of two the faster is right."""
    rates = sorted(result.rates[rate] for result in alike if rate in result.rates)
    return rates[len(rates) // 2]

"""A storm of random faults over two simulated nodes, under tools/launch.py.

    python -m tests.support.storm --faults 200 [--first SEED] [--workers 2]

Each run has one injected fault and up to two from outside.  A stopped run is started again, as a
scheduler does, and so is a killed launcher.  Every run must end with the numbers of the undisturbed
one, lose at most one checkpoint interval per fault, and leave no process, port or folder in shared
memory; a fault that no restart cures must end it with a report instead.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from megatron.training.fault_tolerance.heartbeat import STATE_FILE
from tests.support.supervised import SupervisedRun

RANKS = 2  # of each node
STEPS = 24
EVERY = 2
PACE = "step.before:slow:0.1s"  # faults from outside must find the step that they wait for
FLAGS = (
    "--global-batch-size 8 --load-newest-valid --check-weight-hash-across-dp-replicas-interval 1"
).split()
# Injected faults of the first start: {rank} and {step} are random.
INJECTED = {
    "kill": "step.before:kill:rank{rank}:step{step}:start0",
    "kill in a save": "save.written:kill:rank{rank}:start0",
    "exception": "step.before:raise:rank{rank}:step{step}:start0",
    "stopped process": "step.before:stop:rank{rank}:step{step}:start0",
    "exit": "step.before:exit:rank{rank}:step{step}:start0",
    "full disk": "save.write:enospc:rank{rank}:start0:times1",
    "slow rank": "step.before:slow:rank{rank}:step{step}:start0:3s",
    "NaN once": "step.gradient:nan:rank{rank}:step{step}:start0:times1",
    "NaN on a rank": "step.gradient:nan:rank{rank}:step{step}:start0",
    "flipped bit": "step.updated:bitflip:rank{rank}:step{step}:start0:times1",
    "none": "",
}
ENDLESS = {"NaN always": "step.gradient:nan:rank{rank}:step{step}"}  # no restart cures it
OUTSIDE = (
    *("kill rank", "stop rank", "SIGTERM to a rank", "SIGTERM to a launcher"),
    *("SIGUSR1 to a launcher", "kill launcher 0 (store)", "kill launcher 1", "kill all launchers"),
)
# Seconds; the floors of learned limits are longer than a test should take.
LIMITS = {"setup": 25.0, "step": 6.0, "checkpointing": 20.0}


@dataclass(frozen=True)
class Plan:
    """Faults of one run: the injected one, then (step, fault) from outside."""

    seed: int
    injected: str
    rank: int
    step: int
    outside: tuple[tuple[int, str], ...]

    @property
    def faults(self) -> list[str]:
        """All faults, for the count."""
        injected = [] if self.injected == "none" else [self.injected]
        return [*injected, *(fault for _, fault in self.outside)]


def draw(seed: int) -> Plan:
    """Return the plan of ``seed``."""
    rng = random.Random(seed)
    injected = rng.choice([*INJECTED, *ENDLESS])
    first = rng.randint(3, 9)
    steps = (rng.randint(11, 15), rng.randint(17, 21))
    outside = tuple((step, rng.choice(OUTSIDE)) for step in steps[: rng.randint(1, 2)])
    return Plan(
        seed, injected, rng.randrange(2 * RANKS), first, () if injected in ENDLESS else outside
    )


class Storm:
    """Runs plans in ``folder`` and collects what was wrong."""

    def __init__(self, folder: Path, ranks: int = RANKS, *, forks: bool = False) -> None:
        """``ranks`` of each node; ``forks``: of `SupervisedRun`, if no plan kills a launcher."""
        self._folder = folder
        self._ranks = ranks
        self._forks = forks
        self.wrong: list[str] = []
        self.counts: Counter[str] = Counter()
        calm = self._run(folder / "calm", "").start_all()
        assert calm.wait() == [0, 0], calm.said()[-4000:]
        self.expected = calm.numbers()
        assert set(self.expected) == set(range(1, STEPS + 1))

    def strike(self, plan: Plan) -> None:
        """Run ``plan``; add what was wrong."""
        spec = {**INJECTED, **ENDLESS}[plan.injected].format(rank=plan.rank, step=plan.step)
        run = self._run(self._folder / f"seed{plan.seed}", f"{spec},{PACE}" if spec else PACE)
        began_s = time.monotonic()
        try:
            problems = list(self._problems(run, plan))
        except (AssertionError, OSError, ValueError, subprocess.TimeoutExpired) as error:
            problems = [f"{type(error).__name__}: {str(error)[-600:]}"]
        finally:
            run.kill()
            took_s = time.monotonic() - began_s
            line = f"seed {plan.seed}: {', '.join(plan.faults)} ({took_s:.0f} s)"
            print(line, *problems, sep="\n    ", flush=True)
            self.wrong += [f"{line}: {problem}" for problem in problems]
            self.counts.update(plan.faults)

    def _problems(self, run: SupervisedRun, plan: Plan) -> list[str]:
        codes = self._live(run, plan)
        report = run.exit()
        problems = []
        if plan.injected in ENDLESS:
            if not all(codes) or report["kind"] == "done":
                problems.append(f"not ended by its fault: {codes}, {report['reason']}")
        elif codes != [0, 0] or report["kind"] != "done":
            problems.append(f"ended with {codes}: {report['reason']}: {report['first_cause']}")
        numbers = run.numbers()
        others = [i for i, line in numbers.items() if line != self.expected[i]]
        if others:
            problems.append(f"other numbers in {others[:5]}")
        if plan.injected not in ENDLESS and set(numbers) != set(self.expected):
            problems.append(f"steps are missing: {sorted(set(self.expected) - set(numbers))}")
        for before, after in zip(report["outcomes"], report["outcomes"][1:], strict=False):
            lost = (before["iteration"] or 0) - (after["loaded_iteration"] or 0)
            if (
                after["loaded_iteration"] is not None
                and lost > EVERY
                and not report["blamed_checkpoints"]
            ):
                problems.append(f"{lost} steps were lost after: {before['cause']}")
        return problems + left_behind(run)

    def _live(self, run: SupervisedRun, plan: Plan) -> list[int]:
        """Start the run, apply the faults from outside; start again what a scheduler would."""
        run.start_all()
        for step, fault in plan.outside:
            run.until(lambda step=step: run.logged(step))  # type: ignore[misc]
            if any(process.poll() is None for process in run.processes.values()):
                apply(fault, run, plan)
            self._requeue(run)
        return run.wait()

    def _requeue(self, run: SupervisedRun) -> None:
        """Start launchers again that were killed, and a run that stopped as asked."""
        if all(process.poll() is not None for process in run.processes.values()):
            report = run.folder / "reports/exit.json"
            kind = json.loads(report.read_text())["kind"] if report.exists() else "killed"
            if kind in ("stopped", "killed") and not run.logged(STEPS):
                run.start_all()

    def _run(self, folder: Path, faults: str) -> SupervisedRun:
        folder.mkdir(parents=True)
        run = SupervisedRun(
            folder,
            nodes=2,
            ranks=self._ranks,
            steps=STEPS,
            flags=FLAGS,
            environ={"FAULTS": faults},
            forks=self._forks,
        )
        state = {"section": LIMITS, "calculated_sections": sorted(LIMITS), "out_of_section": 8.0}
        state["is_out_of_section_calculated"] = True
        (folder / "checkpoints").mkdir()
        text = json.dumps({"current_timeouts": {"section": state}})
        (folder / "checkpoints" / STATE_FILE).write_text(text)
        return run


def apply(fault: str, run: SupervisedRun, plan: Plan) -> None:
    """Carry out a fault from outside."""
    node = plan.seed % 2
    if fault.endswith("rank"):
        ranks = run.rank_processes()
        if plan.rank in ranks:
            numbers = {"kill rank": signal.SIGKILL, "stop rank": signal.SIGSTOP}
            os.kill(ranks[plan.rank], numbers.get(fault, signal.SIGTERM))
        if "SIGTERM" in fault:
            run.until(lambda: False)  # the run stops as asked
        return
    if fault.startswith("kill"):
        nodes = [0, 1] if "all" in fault else [int(fault.split()[2])]
        for each in nodes:
            run.processes[each].kill()
            run.processes[each].wait()
        for each in nodes:
            run.start(each)
        return
    run.processes[node].send_signal(signal.SIGTERM if "SIGTERM" in fault else signal.SIGUSR1)
    run.until(lambda: False)


def left_behind(run: SupervisedRun) -> list[str]:
    """Return what a run has left: processes, its port, folders in shared memory."""
    found = [f"rank {rank}: process {pid}" for rank, pid in run.rank_processes().items()]
    found += [str(path) for path in Path("/dev/shm").glob(f"megatron-*{run.run_id}*")]
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", run.port))
        except OSError:
            found.append(f"port {run.port}")
    return [f"left behind: {thing}" for thing in found]


def main() -> int:
    """Strike until the number of faults is reached; 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--workers", type=int, default=1, help="runs at the same time")
    asked = parser.parse_args()
    plans = []
    count = 0
    while count < asked.faults:
        plans.append(draw(asked.first + len(plans)))
        count += len(plans[-1].faults)
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="storm-") as folder:
        storm = Storm(Path(folder))
        with ThreadPoolExecutor(asked.workers) as pool:
            list(pool.map(storm.strike, plans))
    print(f"{count} faults in {len(plans)} runs, {time.monotonic() - began_s:.0f} s")
    for fault, times in sorted(storm.counts.items()):
        print(f"  {times:4} {fault}")
    print(f"wrong: {len(storm.wrong)}", *storm.wrong, sep="\n  ")
    return 1 if storm.wrong else 0


if __name__ == "__main__":
    sys.exit(main())

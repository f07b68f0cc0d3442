"""Measure what fault tolerance costs an undisturbed run (results: benchmarks/supervisor.md).

    python -m benchmarks.supervisor steps [--rounds 6] [--ranks 1] [--together]
    python -m benchmarks.supervisor agents [--seconds 30]

``steps`` compares complete runs of pretrain_gpt.py by the CPU time of a step and by its wall time
without scheduling delay, that is without the time in which other processes had the cores.  The
contenders alternate, and each round runs them in the opposite order of the round before.  With
``--together`` those of a round run at the same time, so that other jobs disturb all of them
equally; only steps in which all were running count.  The contenders:

    off        torchrun, --rerun-mode disabled
    supervisor tools/launch.py, --rerun-mode validate_results, --enable-ft-package: heartbeats and
               limits, exit reports, reruns

``agents`` measures the CPU time of tools/launch.py and of torchrun's agent, which share the cores
of the ranks, and that of a rank that notes its iteration.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.step_clock import VARIABLE
from megatron.training.process import exit_report

ROOT = Path(__file__).resolve().parent.parent
COMMON = (
    "--device cpu --num-attention-heads 4 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer "
    "--log-interval 1 --eval-interval 1000000 --eval-iters 1 --num-workers 0"
).split()
TINY = (
    "--num-layers 2 --hidden-size 32 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 2 --global-batch-size 8 --vocab-size 100"
).split()
SECOND = (  # a step takes about 1 s of one core
    "--num-layers 6 --hidden-size 256 --seq-length 256 --max-position-embeddings 256 "
    "--micro-batch-size 2 --global-batch-size 16 --vocab-size 1000"
).split()
AGENTS = {
    "tools/launch.py": ["tools/launch.py"],
    "torchrun": ["-m", "torch.distributed.run", "--standalone"],
}
WATCHED = ["--rerun-mode", "validate_results", "--enable-ft-package", "--calc-ft-timeouts"]
CONTENDERS = {
    "off": (AGENTS["torchrun"], ["--rerun-mode", "disabled"]),
    "supervisor": (AGENTS["tools/launch.py"], WATCHED),
}
# Of each step in ms: CPU, wall without delay, wall; and the time of its end.
StepTimes = list[tuple[float, float, float, float]]
_TICKS = os.sysconf("SC_CLK_TCK")
_CALLS = 100_000


def step_times(name: str, ranks: int, steps: int, warmup: int) -> StepTimes:
    """Run a contender; return the times of the steps of all ranks, without the first steps."""
    launcher, flags = CONTENDERS[name]
    with tempfile.TemporaryDirectory() as folder:
        clock = f"{folder}/clock"
        command = [sys.executable, *launcher, "--nproc-per-node", str(ranks), "pretrain_gpt.py"]
        command += [*COMMON, *SECOND, *flags, "--train-iters", str(steps + warmup)]
        command += ["--save", f"{folder}/checkpoints", "--no-save-optim"]
        command += ["--callback", "benchmarks.step_clock:StepClock"]
        environ = {**os.environ, VARIABLE: clock, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        subprocess.run(command, cwd=ROOT, env=environ, check=True, capture_output=True)
        times = []
        for rank in range(ranks):
            ends = json.loads(Path(f"{clock}.{rank}").read_text())[warmup - 1 :]
            for before, after in zip(ends, ends[1:], strict=False):
                cpu, wall, delay = ((b - a) / 1e6 for a, b in zip(before, after, strict=True))
                times.append((cpu, wall - delay, wall, after[1] / 1e6))
        return times


def compare_steps(asked: argparse.Namespace) -> dict[str, list[StepTimes]]:
    """Run all contenders, print a table, and return the times of each run."""
    names = [*CONTENDERS]
    runs: dict[str, list[StepTimes]] = {name: [] for name in names}
    for index in range(asked.rounds):
        order = names[:: 1 if index % 2 else -1]
        with ThreadPoolExecutor(len(order) if asked.together else 1) as pool:
            found = list(
                pool.map(
                    lambda name: step_times(name, asked.ranks, asked.steps, asked.warmup), order
                )
            )
        until_ms = min(times[-1][3] for times in found) if asked.together else math.inf
        for name, times in zip(order, found, strict=True):
            runs[name].append([step for step in times if step[3] <= until_ms])
    print_steps(runs)
    return runs


def print_steps(runs: dict[str, list[StepTimes]]) -> None:
    """Print a table of the times."""
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    print(f"load {load}\n")
    print(
        "| contender | ms per step | fastest tenth | median | slowest tenth | of off, per round |"
    )
    print("|---|---|---|---|---|---|")
    for index, what in enumerate(("CPU", "wall without delay", "wall")):
        for name, found in runs.items():
            tenths = statistics.quantiles([step[index] for run in found for step in run], n=10)
            ratios = sorted(
                middle(run, index) / middle(off, index)
                for run, off in zip(found, runs["off"], strict=True)
            )
            print(
                f"| {name} | {what} | {tenths[0]:.1f} | {tenths[4]:.1f} | {tenths[-1]:.1f} | "
                f"{statistics.median(ratios):.4f} ({ratios[0]:.4f} to {ratios[-1]:.4f}) |"
            )


def middle(run: StepTimes, index: int) -> float:
    """Return the median of one of the times."""
    return statistics.median(step[index] for step in run)


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process, all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def share_of_core(launcher: list[str], seconds: float) -> float:
    """Return the CPU time of a launcher per second, while its two ranks train."""
    with tempfile.TemporaryDirectory() as name:
        metrics = Path(name) / "metrics"
        flags = [*COMMON, *TINY, "--train-iters", "1000000", "--metrics-file", str(metrics)]
        command = [sys.executable, *launcher, "--nproc-per-node", "2", "pretrain_gpt.py", *flags]
        run = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            while not metrics.exists() or metrics.stat().st_size == 0:
                time.sleep(0.5)
            before_s = cpu_s(run.pid)
            began_s = time.monotonic()
            time.sleep(seconds)
            return (cpu_s(run.pid) - before_s) / (time.monotonic() - began_s)
        finally:
            run.send_signal(signal.SIGTERM)
            run.wait()


def compare_agents(seconds: float) -> None:
    """Measure the supervisor, torchrun's agent and a note, and print."""
    cores = len(os.sched_getaffinity(0))
    for name, launcher in AGENTS.items():
        share = share_of_core(launcher, seconds)
        print(
            f"{name}: {100 * share:.2f} % of a core, {100 * share / cores:.2f} % of {cores} cores"
        )
    began_s = time.perf_counter()
    for iteration in range(_CALLS):
        exit_report.note(iteration=iteration)
    print(f"note of a rank: {1e6 * (time.perf_counter() - began_s) / _CALLS:.2f} us per step")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", choices=("steps", "agents"))
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--rounds", type=int, default=6, help="runs of each contender")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20, help="measured steps of a run")
    parser.add_argument("--together", action="store_true", help="contenders at the same time")
    parser.add_argument("--output", type=Path, help="write all times of all steps as JSON")
    parser.add_argument("--warmup", type=int, default=3, help="steps before them")
    asked = parser.parse_args()
    if asked.part == "agents":
        compare_agents(asked.seconds)
    else:
        runs = compare_steps(asked)
        if asked.output is not None:
            asked.output.write_text(json.dumps(runs))


if __name__ == "__main__":
    main()

"""Measure what tools/launch.py costs an undisturbed run.

    python -m benchmarks.supervisor [--seconds 30]

The supervisor shares the cores of the ranks, so its CPU time per second of the run is what it can
take from them; torchrun's agent, which it replaces, is measured in the same way.  A rank itself
notes its iteration once per step.

2026-11-23, 2 cores, torch 2.13, two ranks of a tiny model, 30 s: tools/launch.py 0.08 % of both
cores, torchrun 0.10 %; a note takes 0.66 us, at a step of 15 ms 0.004 %.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from megatron.training.process import exit_report

ROOT = Path(__file__).resolve().parent.parent
TINY = (
    "--device cpu --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 8 --lr 1e-3 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 100 --log-interval 1 "
    "--eval-interval 1000000 --eval-iters 1 --num-workers 0"
).split()
_TICKS = os.sysconf("SC_CLK_TCK")
_CALLS = 100_000


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process, all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def share_of_core(launcher: list[str], seconds: float) -> float:
    """Return the CPU time of a launcher per second, while its two ranks train."""
    with tempfile.TemporaryDirectory() as name:
        metrics = Path(name) / "metrics"
        flags = [*TINY, "--train-iters", "1000000", "--metrics-file", str(metrics)]
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


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=30.0)
    asked = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    for name, launcher in {
        "tools/launch.py": ["tools/launch.py"],
        "torchrun": ["-m", "torch.distributed.run", "--standalone"],
    }.items():
        share = share_of_core(launcher, asked.seconds)
        print(
            f"{name}: {100 * share:.2f} % of a core, {100 * share / cores:.2f} % of {cores} cores"
        )
    began_s = time.perf_counter()
    for iteration in range(_CALLS):
        exit_report.note(iteration=iteration)
    print(f"note of a rank: {1e6 * (time.perf_counter() - began_s) / _CALLS:.2f} us per step")


if __name__ == "__main__":
    main()

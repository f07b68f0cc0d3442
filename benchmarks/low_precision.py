"""Compare the loss of fp8 and fp4 with fp32: 300 steps on real text for each format.

    python -m benchmarks.low_precision [--text FILE ...] [--steps 300] [--only NAME ...]

The text is read as bytes: FILEs, or the corpus of examples/quickstart.  All runs have the same
initial weights and the same samples.  Prints the mean loss of the last 50 steps, and its difference
from that of fp32.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean

import numpy as np
import torch

from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

ROOT = Path(__file__).resolve().parent.parent
RUNS = {
    "fp32": "",
    "fp32, summed in another order": "--micro-batch-size 4",
    "bf16": "--bf16",
    "delayed": "--bf16 --fp8-format hybrid --fp8-amax-history-len 16 --fp8-amax-compute-algo max",
    "tensorwise": "--bf16 --fp8-format hybrid --fp8-recipe tensorwise",
    "tensorwise e4m3": "--bf16 --fp8-format e4m3 --fp8-recipe tensorwise",
    "blockwise": "--bf16 --fp8-format e4m3 --fp8-recipe blockwise",
    "mxfp8": "--bf16 --fp8-format e4m3 --fp8-recipe mxfp8",
    "nvfp4": "--bf16 --fp4-format e2m1",
    "nvfp4, ends in bf16": "--bf16 --fp4-format e2m1 --first-last-layers-bf16",
}
LAST = 50


def command_line(folder: Path, steps: int, name: str) -> list[str]:
    """Return the flags of a run."""
    common = (
        "--device cpu --num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 "
        "--max-position-embeddings 128 --position-embedding-type rope --normalization RMSNorm "
        "--swiglu --ffn-hidden-size 384 --disable-bias-linear --attention-dropout 0 "
        f"--hidden-dropout 0 --micro-batch-size 8 --global-batch-size 8 --train-iters {steps} "
        "--lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 20 --weight-decay 0.1 "
        "--adam-beta2 0.95 --clip-grad 1.0 --tokenizer-type NullTokenizer --vocab-size 256 "
        f"--num-workers 0 --log-interval 1 --eval-interval {steps} --eval-iters 0 "
        f"--no-create-attention-mask-in-dataloader --split 100,0,0 --data-path {folder}/text "
    )
    return f"{common} --metrics-file {folder}/metrics.jsonl {RUNS[name]}".split()


def prepare(folder: Path, texts: list[str]) -> None:
    """Write token files of the paragraphs of ``texts``, one token per byte."""
    if not texts:
        corpus = [sys.executable, "examples/quickstart/corpus.py", str(folder)]
        subprocess.run(corpus, check=True, cwd=ROOT)
        lines = (folder / "train.jsonl").read_text().splitlines()
        paragraphs = [json.loads(line)["text"] for line in lines]
    else:
        whole = "\n".join(Path(text).read_text() for text in texts)
        paragraphs = [p for p in whole.split("\n\n") if p.strip()]
    builder = IndexedDatasetBuilder(f"{folder}/text.bin", dtype=np.uint16)
    for paragraph in paragraphs:
        tokens = torch.tensor(list(paragraph.encode()))
        builder.add_document(tokens, [len(tokens)])
    builder.finalize(f"{folder}/text.idx")


def run(folder: Path, steps: int, name: str) -> float:
    """Return the mean loss of the last steps."""
    (folder / "metrics.jsonl").unlink(missing_ok=True)
    command = [sys.executable, "pretrain_gpt.py", *command_line(folder, steps, name)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    if done.returncode:
        sys.exit(done.stdout[-2000:] + done.stderr[-2000:])
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    losses = [line["lm loss"] for line in map(json.loads, lines) if "lm loss" in line]
    return mean(losses[-LAST:])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--text", nargs="*", default=[])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--only", nargs="*", default=list(RUNS), choices=RUNS)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        prepare(folder, asked.text)
        exact = run(folder, asked.steps, "fp32")
        print(f"| run | loss of steps {asked.steps - LAST + 1} to {asked.steps} | beside fp32 |")
        print("|---|---|---|", flush=True)
        for name in asked.only:
            loss = exact if name == "fp32" else run(folder, asked.steps, name)
            print(f"| {name} | {loss:.4f} | {100 * (loss / exact - 1):+.2f} % |", flush=True)


if __name__ == "__main__":
    main()

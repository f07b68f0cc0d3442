"""Compare methods of balancing experts: 500 training steps on text for each method.

    python -m benchmarks.expert_balance [--folder DIR] [--steps 500]

DIR is the folder that examples/quickstart.sh writes: a corpus of real text, its tokenizer and token
files; without --folder they are written again.  The model is a GPT of 4 layers with 8 experts and
top-2 routing, compared with a dense GPT of equal active size.  The load of a layer is the number of
tokens of its fullest expert over the mean: 1 when balanced, 4 when two experts get all tokens.  The
figure shows the mean over layers.  Prints the table and writes the figure, docs/expert_balance.svg.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn

import pretrain_gpt
from megatron.core.enums import ModelType
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.routing import RoutingResult
from megatron.training.training import pretrain

ROOT = Path(__file__).resolve().parent.parent
EXPERTS = "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 64"
METHODS = {
    "dense": "--ffn-hidden-size 128",
    "none": f"{EXPERTS} --moe-router-load-balancing-type none",
    "aux_loss": f"{EXPERTS} --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01",
    "seq_aux_loss": f"{EXPERTS} --moe-router-load-balancing-type seq_aux_loss"
    " --moe-aux-loss-coeff 0.01",
    "global_aux_loss": f"{EXPERTS} --moe-router-load-balancing-type global_aux_loss"
    " --moe-aux-loss-coeff 0.01",
    "sinkhorn": f"{EXPERTS} --moe-router-load-balancing-type sinkhorn",
    "expert bias": f"{EXPERTS} --moe-router-load-balancing-type none"
    " --moe-router-score-function sigmoid --moe-router-enable-expert-bias"
    " --moe-router-bias-update-rate 1e-3",
}
COLORS = dict(
    zip(
        [name for name in METHODS if name != "dense"],
        ("#888888", "#0072b2", "#56b4e9", "#009e73", "#d55e00", "#cc79a7"),
        strict=True,
    )
)


def command_line(folder: Path, steps: int, method: str) -> list[str]:
    """Return the flags of a run."""
    common = (
        "--device cpu --num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 256 "
        "--max-position-embeddings 256 --position-embedding-type rope --normalization RMSNorm "
        "--swiglu --disable-bias-linear --attention-dropout 0 --hidden-dropout 0 "
        f"--micro-batch-size 4 --global-batch-size 8 --train-iters {steps} --lr 3e-3 --min-lr 3e-4 "
        "--lr-decay-style cosine --lr-warmup-iters 20 --weight-decay 0.1 --adam-beta2 0.95 "
        "--clip-grad 1.0 --tokenizer-type GPT2BPETokenizer --num-workers 0 --log-interval 10 "
        f"--no-create-attention-mask-in-dataloader --eval-interval {steps} --eval-iters 32 "
        f"--vocab-file {folder}/tokenizer/vocab.json --merge-file {folder}/tokenizer/merges.txt "
        f"--train-data-path {folder}/train_text_document "
        f"--valid-data-path {folder}/valid_text_document --data-cache-path {folder}/cache "
    )
    return (common + METHODS[method]).split()


def prepare(folder: Path) -> None:
    """Write corpus, tokenizer and token files, as examples/quickstart.sh does."""
    tokenizer = f"--tokenizer-type GPT2BPETokenizer --vocab-file {folder}/tokenizer/vocab.json "
    tokenizer += f"--merge-file {folder}/tokenizer/merges.txt --append-eod --workers 1"
    train = f"tools/train_tokenizer.py --input {folder}/train.jsonl --vocab-size 4096"
    commands = [
        f"examples/quickstart/corpus.py {folder}",
        f"{train} --output-dir {folder}/tokenizer",
        *(
            f"tools/preprocess_data.py --input {folder}/{part}.jsonl "
            f"--output-prefix {folder}/{part} {tokenizer}"
            for part in ("train", "valid")
        ),
    ]
    for command in commands:
        subprocess.run([sys.executable, *command.split()], check=True, cwd=ROOT)


def work(found: Path) -> None:
    """Run once in this process; write the load of each step to ``found``."""
    counts: list[list[Tensor]] = []  # by layer and micro-batch

    def note(router: nn.Module, _: Any, routing: RoutingResult) -> None:
        if router.training and torch.is_grad_enabled():
            counts[places[router]].append(routing.counts().float())

    places: dict[nn.Module, int] = {}

    def provider(*args: Any, **kwargs: Any) -> nn.Module:
        model = pretrain_gpt.model_provider(*args, **kwargs)
        for module in model.modules():
            if isinstance(module, TopKRouter):
                places[module] = len(counts)
                counts.append([])
                module.register_forward_hook(note)
        return model

    datasets = pretrain_gpt.train_valid_test_datasets_provider
    pretrain(datasets, provider, ModelType.encoder_or_decoder, pretrain_gpt.forward_step)
    steps = [[a + b for a, b in zip(c[::2], c[1::2], strict=True)] for c in counts]
    loads = [[(c.max() / c.mean()).item() for c in layer] for layer in steps]
    found.write_text(json.dumps([mean(step) for step in zip(*loads, strict=True)]))


def run(folder: Path, steps: int, method: str) -> tuple[list[float], float, float]:
    """Return load of each step, training loss of the last tenth of the steps, validation loss."""
    found = folder / "loads.json"
    command = [sys.executable, "-m", "benchmarks.expert_balance", "--work", str(found)]
    command += command_line(folder, steps, method)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    if done.returncode:
        sys.exit(done.stdout[-2000:] + done.stderr[-2000:])
    out = done.stdout
    trained = [float(loss) for loss in re.findall(r"iteration .*lm loss: ([\d.E+-]+)", out)]
    valid = re.findall(r"validation loss at iteration .*lm loss value: ([\d.E+-]+)", out)
    return json.loads(found.read_text()), mean(trained[-steps // 100 :]), float(valid[0])


def svg(loads: dict[str, list[float]], steps: int) -> str:
    """Return the figure: one line per method, the mean load of every ten steps."""
    width, height, left, top, highest = 760, 360, 50, 20, 4.0
    starts = range(0, steps, 10)
    x = [left + (width - left - 150) * (i + 0.5) / len(starts) for i in range(len(starts))]

    def y(load: float) -> float:
        return top + (height - top - 40) * (highest - min(load, highest)) / (highest - 1.0)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>'
    ]
    for load in (1, 2, 3, 4):
        parts.append(
            f'<line x1="{left}" x2="{width - 150}" y1="{y(load):.1f}" y2="{y(load):.1f}" '
            f'stroke="#ddd"/><text x="{left - 15}" y="{y(load) + 4:.1f}">{load}</text>'
        )
    for i, (name, of_steps) in enumerate(loads.items()):
        means = [mean(of_steps[s : s + 10]) for s in starts]
        points = " ".join(f"{a:.1f},{y(b):.1f}" for a, b in zip(x, means, strict=True))
        color = COLORS[name]
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts.append(f'<text x="{width - 140}" y="{40 + 18 * i}" fill="{color}">{name}</text>')
    parts.append(f'<text x="{left}" y="{height - 8}">steps 1 to {steps}</text>')
    parts.append(f'<text x="4" y="{top - 6}">fullest expert / mean</text></svg>')
    return "\n".join(parts) + "\n"


def compare(folder: Path, num_steps: int) -> None:
    """Run every method; print the table and write the figure."""
    loads: dict[str, list[float]] = {}
    table = [
        "| method | load, first 50 steps | last 50 | highest of the last 50 "
        "| training loss, last tenth | validation loss |",
        "|---|---|---|---|---|---|",
    ]
    for method in METHODS:
        load, trained, valid = run(folder, num_steps, method)
        row = f"| {method} | - | - | - "
        if load:
            loads[method] = load
            last = load[-50:]
            row = f"| {method} | {mean(load[:50]):.2f} | {mean(last):.2f} | {max(last):.2f} "
        table.append(f"{row}| {trained:.4f} | {valid:.4f} |")
        print(table[-1], flush=True)
    docs = ROOT / "docs"
    (docs / "expert_balance.svg").write_text(svg(loads, num_steps))
    print("\n".join(table))


def main() -> None:
    """Entry point."""
    if sys.argv[1:2] == ["--work"]:
        found = Path(sys.argv[2])
        del sys.argv[1:3]
        work(found)
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--steps", type=int, default=500)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        if args.folder is None:
            prepare(Path(scratch))
        compare((args.folder or Path(scratch)).resolve(), args.steps)


if __name__ == "__main__":
    main()

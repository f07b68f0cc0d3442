"""Compare a run's validation loss with that of a unigram model, which uses no context.

    python examples/quickstart/unigram.py LOG LEAD FLAGS OF THE RUN

Counts the tokens that the training samples predict (next tokens, masked tokens, tokens of masked
spans), with one added to each count.  Prints the mean -log p of those of the validation samples and
the last validation loss in the run's log, both in nats per token.  Exits with 1 unless the run's
loss is lower by LEAD.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import math
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # installed or not

from megatron.training.data.datasets import build_datasets
from megatron.training.data.loaders import train_valid_test_num_samples
from megatron.training.initialize import configure, start


def main() -> int:
    """Compare and print; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("log", type=Path, help="console log of the run")
    parser.add_argument("lead", type=float, help="nats by which the run's loss must be lower")
    args, flags = parser.parse_known_args()
    with contextlib.redirect_stdout(io.StringIO()):
        run = start(configure(argv=flags))
        train, valid, _ = build_datasets(run, train_valid_test_num_samples(run))
    unigram = unigram_loss(asked_for(train), asked_for(valid))
    losses = last_validation_losses(args.log.read_text())
    print(f"validation loss of a unigram model: {unigram:.3f} nats a token")
    print(f"validation loss of the trained model: {losses['lm']:.3f} nats a token")
    if "sop" in losses:
        print(f"order of sentences: {losses['sop']:.3f}; a coin has {math.log(2):.3f}")
    if losses["lm"] < unigram - args.lead:
        return 0
    print(
        f"the trained model is not {args.lead} nats better than the unigram model after "
        f"{run.train_iters} iterations: train longer (TRAIN_ITERS, 400 or more)",
        file=sys.stderr,
    )
    return 1


def asked_for(samples: Iterable[Mapping[str, Any]]) -> np.ndarray:
    """Return the labels inside the loss mask, of all samples, concatenated."""
    rows = ((np.asarray(s["labels"]), np.asarray(s["loss_mask"])) for s in samples)
    return np.concatenate([labels[mask > 0] for labels, mask in rows])


def unigram_loss(train: np.ndarray, valid: np.ndarray) -> float:
    """Return mean -log p(token) on ``valid``, with p from the counts on ``train`` plus one."""
    counts = np.bincount(train, minlength=int(max(train.max(), valid.max())) + 1) + 1.0
    log_p = np.log(counts / counts.sum())
    return float(-log_p[valid].mean())


def last_validation_losses(log: str) -> dict[str, float]:
    """Return the losses in the last ``validation loss`` line of a console log, by name."""
    line = re.findall(r"validation loss at .*", log)[-1]
    return {name: float(value) for name, value in re.findall(r"(\w+) loss value: (\S+)", line)}


if __name__ == "__main__":
    raise SystemExit(main())

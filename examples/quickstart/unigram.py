"""What a model without any context would reach: the unigram loss of the validation data.

    python examples/quickstart/unigram.py LOG LEAD FLAGS OF THE RUN

Counts the tokens that the samples of the run ask for (the next, the hidden, those of the hidden
spans), with one more of every token, and prints the mean -log p of those of the validation samples
beside the last validation loss in the run's log, both in nats a token.  Ends with 1 unless training
is ahead by LEAD.
"""

from __future__ import annotations

import contextlib
import io
import math
import re
import sys
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # installed or not

from megatron.training.data.datasets import build_datasets
from megatron.training.data.loaders import train_valid_test_num_samples
from megatron.training.initialize import configure, start
from megatron.training.runtime import setup
from megatron.training.runtime.setup import build_stage


def main() -> int:
    """Compare and print; the exit code."""
    log, lead, *flags = sys.argv[1:]
    with contextlib.redirect_stdout(io.StringIO()):
        run = start(configure(argv=flags))
        run.train_iters = run.config.training.train_iters
        setup.setup_tokenizer(run)
        setup.build_model_chunks(run, partial(build_stage, run))  # its stages say what is read
        train, valid, _ = build_datasets(run, train_valid_test_num_samples(run))
    unigram = unigram_loss(asked_for(train), asked_for(valid))
    losses = last_validation_losses(Path(log).read_text())
    print(f"validation loss of a unigram model: {unigram:.3f} nats a token")
    print(f"validation loss of the trained model: {losses['lm']:.3f} nats a token")
    if "sop" in losses:
        print(f"order of sentences: {losses['sop']:.3f}; a coin has {math.log(2):.3f}")
    if losses["lm"] < unigram - float(lead):
        return 0
    print(
        f"the trained model is not {lead} nats better than the unigram model after "
        f"{run.train_iters} iterations: train longer (TRAIN_ITERS, 400 or more)",
        file=sys.stderr,
    )
    return 1


def asked_for(samples: Iterable[Mapping[str, Any]]) -> np.ndarray:
    """The labels that count, of all samples in one row."""
    rows = ((np.asarray(s["labels"]), np.asarray(s["loss_mask"])) for s in samples)
    return np.concatenate([labels[mask > 0] for labels, mask in rows])


def unigram_loss(train: np.ndarray, valid: np.ndarray) -> float:
    """Mean -log p(token) on ``valid``, p counted on ``train`` with one more of every token."""
    counts = np.bincount(train, minlength=int(max(train.max(), valid.max())) + 1) + 1.0
    log_p = np.log(counts / counts.sum())
    return float(-log_p[valid].mean())


def last_validation_losses(log: str) -> dict[str, float]:
    """The numbers in the last ``validation loss`` line of a console log, by name."""
    line = re.findall(r"validation loss at .*", log)[-1]
    return {name: float(value) for name, value in re.findall(r"(\w+) loss value: (\S+)", line)}


if __name__ == "__main__":
    raise SystemExit(main())

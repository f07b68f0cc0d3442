"""What a model without any context would reach: the unigram loss of the validation data.

    python examples/quickstart/unigram.py TRAIN_PREFIX VALID_PREFIX LOG

Prints it beside the last validation loss in the log of a training run, both in nats a token, and
ends with 1 unless training is ahead by half a nat.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # installed or not

from megatron.core.datasets.indexed_dataset import IndexedDataset

CLEAR_LEAD = 0.5  # nats a token


def main() -> int:
    """Compare and print; the exit code."""
    train_prefix, valid_prefix, log = sys.argv[1:]
    unigram = unigram_loss(tokens_of(train_prefix), tokens_of(valid_prefix))
    model = last_validation_loss(Path(log).read_text())
    print(f"validation loss of a unigram model: {unigram:.3f} nats a token")
    print(f"validation loss of the trained GPT: {model:.3f} nats a token")
    return 0 if model < unigram - CLEAR_LEAD else 1


def tokens_of(prefix: str) -> np.ndarray:
    """All tokens of an indexed dataset in one row."""
    return np.concatenate(list(IndexedDataset(prefix)))


def unigram_loss(train: np.ndarray, valid: np.ndarray) -> float:
    """Mean -log p(token) on ``valid``, p counted on ``train`` with one more of every token."""
    counts = np.bincount(train, minlength=int(max(train.max(), valid.max())) + 1) + 1.0
    log_p = np.log(counts / counts.sum())
    return float(-log_p[valid].mean())


def last_validation_loss(log: str) -> float:
    """The number in the last ``validation loss`` line of a console log."""
    return float(re.findall(r"validation loss at .*? lm loss value: (\S+)", log)[-1])


if __name__ == "__main__":
    raise SystemExit(main())

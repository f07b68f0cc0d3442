"""A recipe's flags with small numbers in them: the same features, a minute on two cores."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

ITERATIONS = 10

# Flags whose product is the number of ranks one replica of the dense model needs.
DEGREES = (
    "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size",
    "--context-parallel-size",
)

# flag -> the largest value that is kept
AT_MOST = {
    "--tensor-model-parallel-size": 2,
    "--pipeline-model-parallel-size": 2,
    "--context-parallel-size": 2,
    "--expert-model-parallel-size": 2,
    "--expert-tensor-parallel-size": 2,
    "--hidden-size": 64,
    "--ffn-hidden-size": 128,
    "--num-attention-heads": 8,
    "--num-query-groups": 4,
    "--kv-channels": 16,
    "--num-experts": 4,
    "--moe-ffn-hidden-size": 32,
    "--moe-shared-expert-intermediate-size": 32,
    "--moe-router-topk": 2,
    "--seq-length": 64,
    "--encoder-seq-length": 64,
    "--decoder-seq-length": 32,
    "--max-position-embeddings": 64,
    "--q-lora-rank": 32,
    "--kv-lora-rank": 32,
    "--qk-head-dim": 16,
    "--qk-pos-emb-head-dim": 8,
    "--v-head-dim": 16,
    "--micro-batch-size": 2,
    "--train-iters": ITERATIONS,
    "--exit-interval": ITERATIONS,
    "--lr-decay-iters": ITERATIONS,
    "--lr-warmup-iters": ITERATIONS // 5,
    "--eval-interval": ITERATIONS // 2,
    "--save-interval": ITERATIONS // 2,
    "--eval-iters": 2,
    "--log-interval": 1,
    "--num-workers": 0,
    "--vocab-size": 512,
    "--make-vocab-size-divisible-by": 64,
}

# Where the real data and tokenizer are named: mock data takes their place.
DATA_FLAGS = (
    "--data-path",
    "--train-data-path",
    "--valid-data-path",
    "--test-data-path",
    "--data-args-path",
    "--per-split-data-args-path",
    "--vocab-file",
    "--merge-file",
    "--tokenizer-model",
    "--tokenizer-type",
    "--tiktoken-pattern",
)
FOLDERS = {
    "--save": "checkpoints",
    "--load": "checkpoints",
    "--tensorboard-dir": "tensorboard",
    "--data-cache-path": "cache",
}


def scale_down(args: Mapping[str, Any], out: Path) -> dict[str, Any]:
    """The same flags with small values, on mock data, everything written under ``out``."""
    small = {flag: value for flag, value in args.items() if flag not in DATA_FLAGS}
    for flag, most in AT_MOST.items():
        if flag in small:
            small[flag] = str(min(int(small[flag]), most))
    for flag, folder in FOLDERS.items():
        if flag in small:
            small[flag] = str(out / folder)
    small["--mock-data"] = "true"
    small["--tokenizer-type"] = "NullTokenizer"
    small.setdefault("--vocab-size", str(AT_MOST["--vocab-size"]))
    _fit_layers(small)
    _fit_batch(small)
    _fit_samples(small, args)
    return small


def _fit_layers(small: dict[str, Any]) -> None:
    """As few layers as give every virtual stage one, two in all at least."""
    stages = int(small.get("--pipeline-model-parallel-size", 1))
    per_chunk = small.get("--num-layers-per-virtual-pipeline-stage")
    chunks = int(small.get("--num-virtual-stages-per-pipeline-rank", 2 if per_chunk else 1))
    if per_chunk:
        small["--num-layers-per-virtual-pipeline-stage"] = "1"
    if "--num-layers" in small and "--pipeline-model-parallel-layout" not in small:
        fewest = max(2, stages * min(chunks, 2))
        small["--num-layers"] = str(min(int(small["--num-layers"]), fewest))


def _fit_batch(small: dict[str, Any]) -> None:
    """Two micro-batches on each replica, and as many as there are stages."""
    stages = int(small.get("--pipeline-model-parallel-size", 1))
    replicas = max(1, int(small.get("--expert-model-parallel-size", 1)))
    replicas = max(1, replicas // prod(int(small.get(flag, 1)) for flag in DEGREES))
    micro = int(small.get("--micro-batch-size", 1))
    if "--global-batch-size" in small:
        small["--global-batch-size"] = str(micro * replicas * max(2, stages))
    ramp = small.get("--rampup-batch-size")
    if ramp:
        size = micro * replicas
        samples = 2 * ITERATIONS * size
        small["--rampup-batch-size"] = [str(size), str(size), str(samples)]


def _fit_samples(small: dict[str, Any], args: Mapping[str, Any]) -> None:
    """Lengths counted in samples shrink as the run does."""
    if "--train-samples" not in args:
        return
    batch = int(small.get("--global-batch-size", small.get("--micro-batch-size", 1)))
    shrink = ITERATIONS * batch / int(args["--train-samples"])
    samples = ("--train-samples", "--lr-decay-samples", "--lr-warmup-samples")
    for flag in samples:
        if flag in args:
            small[flag] = str(round(int(args[flag]) * shrink))

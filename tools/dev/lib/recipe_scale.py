"""Scale down a recipe's flags: the same features, in a minute on two cores."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

ITERATIONS = 10

# Flags whose product is the number of ranks of the dense model without data parallelism.
DEGREES = (
    "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size",
    "--context-parallel-size",
)

# flag -> maximum value
AT_MOST = {
    "--tensor-model-parallel-size": 2,
    "--pipeline-model-parallel-size": 2,
    "--context-parallel-size": 2,
    "--expert-model-parallel-size": 2,
    "--expert-tensor-parallel-size": 2,
    "--num-distributed-optimizer-instances": 2,
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
    "--mamba-state-dim": 16,
    "--mamba-head-dim": 16,
    "--mamba-num-groups": 8,
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
    "--vision-num-layers": 2,
    "--vision-hidden-size": 64,
    "--vision-ffn-hidden-size": 128,
    "--vision-num-attention-heads": 8,
    "--dataloader-seq-length": 32,
    "--total-seq-length": 64,
    "--audio-seq-length": 8,
    "--num-frames": 2,
    "--vocab-size": 512,
    "--make-vocab-size-divisible-by": 64,
}

# Flags of real data, tokenizers and weights, which mock data and random weights replace.
DATA_FLAGS = (
    "--data-path --train-data-path --valid-data-path --test-data-path --data-args-path "
    "--per-split-data-args-path --vocab-file --merge-file --tokenizer-model --tokenizer-type "
    "--tiktoken-pattern --language-model-checkpoint --audio-encoder-model --image-seq-length"
).split()
PATCHES = 4  # in each direction of an image
# Flags of the size of an image.
IMAGE_SIZES = ("--img-h", "--img-w", "--image-size")
# Flags whose value may have an entry for each layer.
PER_LAYER = ("--moe-layer-freq", "--window-attn-skip-freq")

FOLDERS = {
    "--save": "checkpoints",
    "--load": "checkpoints",
    "--tensorboard-dir": "tensorboard",
    "--data-cache-path": "cache",
}


def scale_down(args: Mapping[str, Any], out: Path) -> dict[str, Any]:
    """Return the flags with small values and mock data, with all output under ``out``."""
    # Use the default backend: recipes name nccl, which needs GPUs.
    left_out = {*DATA_FLAGS, "--distributed-backend"}
    small = {flag: value for flag, value in args.items() if flag not in left_out}
    for flag, most in AT_MOST.items():
        if flag in small:
            small[flag] = str(min(int(small[flag]), most))
    is_mimo = "--model-provider" in small  # its images have a size without a flag
    for flag in IMAGE_SIZES:
        if flag in small or (is_mimo and flag == "--image-size"):
            small[flag] = str(PATCHES * _number(small, "--patch-dim", 16))
    if small.get("--dataloader-type") == "external":  # loaders of real data
        del small["--dataloader-type"]
    for flag, folder in FOLDERS.items():
        if flag in small:
            small[flag] = str(out / folder)
    small["--mock-data"] = "true"
    small["--tokenizer-type"] = "NullTokenizer"
    small.setdefault("--vocab-size", str(AT_MOST["--vocab-size"]))
    if re.search("mamba|--hybrid", str(args)):  # so that groups divide the heads
        small["--mamba-head-dim"] = str(AT_MOST["--mamba-head-dim"])
    _fit_layers(small)
    _fit_batch(small)
    _fit_samples(small, args)
    return small


def smallest_world(args: Mapping[str, Any]) -> int:
    """Return the smallest number of ranks that fits the parallel degrees.

    Each of --num-distributed-optimizer-instances has data-parallel ranks of its own, of dense
    layers and of experts.
    """
    dense = _dense_ranks(args)
    stages = _number(args, "--pipeline-model-parallel-size", 1)
    experts = _number(args, "--expert-model-parallel-size", 1)
    if experts > 1:
        tensor = _number(args, "--tensor-model-parallel-size", 1)
        experts *= _number(args, "--expert-tensor-parallel-size", tensor)
    instances = _number(args, "--num-distributed-optimizer-instances", 1)
    world = dense * instances
    while world % (experts * stages * instances):
        world += dense * instances
    return world


def _dense_ranks(args: Mapping[str, Any]) -> int:
    return prod(_number(args, flag, 1) for flag in DEGREES)


def _number(args: Mapping[str, Any], flag: str, default: int) -> int:
    return int(args.get(flag, default))


def _fit_layers(small: dict[str, Any]) -> None:
    """Use as few layers as give each virtual stage one, but at least two."""
    stages = _number(small, "--pipeline-model-parallel-size", 1)
    if "--num-layers-per-virtual-pipeline-stage" in small:
        small["--num-layers-per-virtual-pipeline-stage"] = "1"
    if "--num-layers" not in small or "--pipeline-model-parallel-layout" in small:
        return
    layers = min(int(small["--num-layers"]), max(2, stages * min(_chunks(small), 2)))
    small["--num-layers"] = str(layers)
    for flag in PER_LAYER:
        if "[" in str(small.get(flag, "")):
            small[flag] = _fewer_entries(str(small[flag]), layers)


def _chunks(args: Mapping[str, Any]) -> int:
    several = "--num-layers-per-virtual-pipeline-stage" in args
    return _number(args, "--num-virtual-stages-per-pipeline-rank", 2 if several else 1)


def _fewer_entries(pattern: str, count: int) -> str:
    """Return ``count`` entries of a list such as ``([0]*1+[1]*23)``, with the first and last.

    >>> _fewer_entries("([0]*1+[1]*23)", 4)
    '([0,1,1,1])'
    """
    entries = [
        entry.strip()
        for inside, times in re.findall(r"\[([^\]]*)\](?:\s*\*\s*(\d+))?", pattern)
        for entry in inside.split(",") * int(times or 1)
    ]
    last = len(entries) - 1
    return f"([{','.join(entries[round(i * last / (count - 1))] for i in range(count))}])"


def _fit_batch(small: dict[str, Any]) -> None:
    """Use two micro-batches per data-parallel rank, or one per pipeline stage if that is more."""
    replicas = smallest_world(small) // _dense_ranks(small)
    stages = _number(small, "--pipeline-model-parallel-size", 1)
    one_each = _number(small, "--micro-batch-size", 1) * replicas
    ramp = "--rampup-batch-size" in small
    if "--global-batch-size" in small:
        small["--global-batch-size"] = str(one_each * max(2, stages) * (2 if ramp else 1))
    if ramp:
        step = one_each * stages
        small["--rampup-batch-size"] = [str(step), str(step), str(step * ITERATIONS // 2)]


def _fit_samples(small: dict[str, Any], args: Mapping[str, Any]) -> None:
    """Reduce lengths in samples by the same factor as the run."""
    if "--train-samples" not in args:
        return
    batch = int(small.get("--global-batch-size", small.get("--micro-batch-size", 1)))
    shrink = ITERATIONS * batch / int(args["--train-samples"])
    samples = ("--train-samples", "--lr-decay-samples", "--lr-warmup-samples")
    for flag in samples:
        if flag in args:
            small[flag] = str(round(int(args[flag]) * shrink))

"""Flag sets whose training on a GPU tools/dev/gpu_lease.py compares with that on a CPU.

benchmarks/gpu_lease_losses.json holds, for each flag set, three losses and sketches of the first
gradients of every parameter (tools/dev/lib/gradient_sketches.py), computed on a CPU.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.config.errors import CheckpointError
from tools.dev.lib.gradient_sketches import Sketches, gaps, sketches_of
from tools.dev.lib.timed_commands import ROOT

REFERENCE = ROOT / "benchmarks" / "gpu_lease_losses.json"
STEPS = 3
TINY = (
    "--num-layers 2 --hidden-size 128 --num-attention-heads 4 --seq-length 64 "
    "--max-position-embeddings 64 --micro-batch-size 2 --global-batch-size 4 "
    f"--train-iters {STEPS} --eval-iters 0 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 512 --hidden-dropout 0 --attention-dropout 0 --log-interval 1 --num-workers 0 "
    # With small weights attention is uniform, and the gradients of queries and keys are lost among
    # those of values.
    "--init-method-std 0.1"
)
_LLAMA = (
    "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    "--untie-embeddings-and-output-weights"
)
_EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.01 --disable-bias-linear"
GPT, T5, BERT, MAMBA = (f"pretrain_{kind}.py" for kind in ("gpt", "t5", "bert", "mamba"))
_MASTER = "--use-distributed-optimizer --use-precision-aware-optimizer"
_RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
_HYBRID = "--num-layers 4 --hybrid-override-pattern M*-M --mamba-num-groups 1 --mamba-head-dim 32"
# With the larger weights of `TINY`, attention to 1,024 keys would magnify the rounding of bf16.
_WIDE = (
    "--hidden-size 1024 --num-attention-heads 8 --seq-length 1024 --max-position-embeddings 1024 "
    "--init-method-std 0.02"
)
_GRAPHS = "--enable-cuda-graph --cuda-graph-warmup-steps 1"
_TP = "--tensor-model-parallel-size 2 --sequence-parallel"
_FP8 = "--bf16 --fp8-format"


@dataclass(frozen=True)
class Limits:
    """Largest relative differences from a CPU: of losses, and of the gradient of a parameter."""

    loss: float
    gradient: float


# The limits rest on CPUs and on the emulated device of tests/support/host_gpu.
# Sums in another order differ by 6e-6.  A GEMM in TF32 would be off by 5e-4.
FP32 = Limits(1e-5, 5e-5)
# bf16 itself changes losses by 4e-4 and gradients by 2e-2; gradients of wrong heads differ by 0.9.
BF16 = Limits(1e-3, 5e-2)
# A value that two devices round to different bf16 values may get different codes, 2^-4 apart: up to
# 0.19, nearly as much as fp8 itself changes gradients.
FP8 = Limits(5e-3, 0.35)
# A token whose scores are nearly equal may go to another expert.
ROUTED = Limits(2e-3, 0.3)
FP8_ROUTED = Limits(5e-3, 0.5)


@dataclass(frozen=True)
class FlagSet:
    """Training run of ``STEPS`` steps; more ``ranks`` than ``gpus`` are connected by gloo."""

    flags: str
    limits: Limits = BF16
    program: str = GPT
    ranks: int = 1
    gpus: int = 1

    def words(self) -> list[str]:
        """Return the command line after the program, without device and folder."""
        words = [*TINY.split(), *self.flags.split()]
        if self.program == T5:
            words += "--encoder-seq-length 64 --decoder-seq-length 64".split()
        if self.ranks > self.gpus:  # NCCL refuses two ranks on one GPU
            words += "--distributed-backend gloo".split()
        return words


FLAG_SETS = {
    "gpt2 in fp32": FlagSet("", FP32),
    "a log line for three steps": FlagSet("--bf16 --log-interval 3"),
    "wide heads and rows": FlagSet(f"--bf16 {_LLAMA} {_WIDE}"),
    "gpt2": FlagSet("--bf16"),
    "llama, grouped queries": FlagSet(
        f"--bf16 {_LLAMA} --group-query-attention --num-query-groups 2"
    ),
    "latent attention": FlagSet(
        "--bf16 --multi-latent-attention --position-embedding-type rope --kv-channels 32"
    ),
    "sliding window": FlagSet(f"--bf16 {_LLAMA} --window-size 16,0"),
    "attention sink": FlagSet(f"--bf16 {_LLAMA} --softmax-type learnable"),
    "documents apart": FlagSet("--bf16 --reset-attention-mask --reset-position-ids"),
    "norms of queries and keys": FlagSet(f"--bf16 {_LLAMA} --qk-layernorm"),
    "experts, grouped GEMMs": FlagSet(f"--bf16 {_EXPERTS} --moe-grouped-gemm", ROUTED),
    "experts, fused router": FlagSet(
        f"--bf16 {_EXPERTS} --moe-grouped-gemm --moe-router-fusion --moe-permute-fusion", ROUTED
    ),
    "experts in fp8": FlagSet(
        f"{_FP8} hybrid --fp8-recipe tensorwise {_EXPERTS} --moe-grouped-gemm", FP8_ROUTED
    ),
    "experts in fp8 blocks": FlagSet(
        f"{_FP8} e4m3 --fp8-recipe blockwise {_EXPERTS} --moe-grouped-gemm", FP8_ROUTED
    ),
    "fp8 delayed": FlagSet(f"{_FP8} hybrid --fp8-recipe delayed", FP8),
    "fp8 tensorwise": FlagSet(f"{_FP8} hybrid --fp8-recipe tensorwise", FP8),
    "fp8 blockwise": FlagSet(f"{_FP8} e4m3 --fp8-recipe blockwise", FP8),
    "fp8 with recomputation": FlagSet(f"{_FP8} hybrid --fp8-recipe tensorwise {_RECOMPUTE}", FP8),
    "precision-aware optimizer": FlagSet(f"--bf16 {_MASTER}"),
    "fully sharded": FlagSet("--bf16 --use-torch-fsdp2 --no-gradient-accumulation-fusion"),
    "optimizer on the host": FlagSet(f"--bf16 {_MASTER} --optimizer-cpu-offload"),
    "recomputation": FlagSet(f"--bf16 {_RECOMPUTE}"),
    "CUDA graphs": FlagSet(f"--bf16 {_GRAPHS}"),
    "a CUDA graph of all passes": FlagSet(
        f"--bf16 {_GRAPHS} --cuda-graph-scope full_iteration --no-check-for-nan-in-loss-and-grad"
    ),
    "asynchronous save": FlagSet("--bf16 --async-save"),
    "deterministic": FlagSet("--bf16 --deterministic-mode"),
    "T5": FlagSet("--bf16 --vocab-extra-ids 20", program=T5),
    "BERT": FlagSet("--bf16", program=BERT),
    "Mamba": FlagSet(f"--bf16 {_HYBRID}", program=MAMBA),
    "TP and SP": FlagSet(f"--bf16 {_TP}", ranks=2),
    "TP with fused collectives": FlagSet(f"--bf16 {_TP} --tp-comm-overlap", ranks=2, gpus=2),
    "a ring of two": FlagSet(f"--bf16 {_LLAMA} --context-parallel-size 2", ranks=2, gpus=2),
    "1F1B": FlagSet("--bf16 --pipeline-model-parallel-size 2", ranks=2, gpus=2),
    "ZeRO": FlagSet(
        "--bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
        ranks=2,
        gpus=2,
    ),
    "experts on two GPUs": FlagSet(
        f"--bf16 {_EXPERTS} --moe-grouped-gemm --expert-model-parallel-size 2 "
        "--moe-token-dispatcher-type alltoall",
        ROUTED,
        ranks=2,
        gpus=2,
    ),
}


@dataclass(frozen=True)
class Training:
    """What a run found: its losses, and sketches of the gradients of its first step."""

    losses: Sequence[float]
    gradients: Mapping[str, Sequence[float]]


def found_in(output: str, folder: Path) -> Training:
    """Return what a run printed, and saved to ``folder`` after its first step; remove the folder.

    Raises CheckpointError.
    """
    try:
        gradients: Sketches = sketches_of(folder / "iter_0000001")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return Training(losses_in(output), gradients)


def losses_in(output: str) -> list[float]:
    """Return the losses of the steps in a log."""
    lines = [line for line in output.splitlines() if "lm loss:" in line]
    return [float(line.split("lm loss:")[1].split("|")[0]) for line in lines]


def judge(output: str, folder: Path, wanted: Training | None, limits: Limits) -> str:
    """Compare a run with that on a CPU; return a result that starts with "ok", or "failed"."""
    try:
        found = found_in(output, folder)
    except CheckpointError as error:
        return f"failed: {error}"
    if wanted is None:
        return "failed: no run on a CPU; use --write-reference there"
    return compare(found, wanted, limits)


def compare(found: Training, wanted: Training, limits: Limits) -> str:
    """Return a result that starts with "ok", or with "failed" and what is beyond the limits."""
    if len(found.losses) != len(wanted.losses):
        return f"failed: {len(found.losses)} losses, not {len(wanted.losses)}"
    apart = [abs(a - b) / abs(b) for a, b in zip(found.losses, wanted.losses, strict=True)]
    of_gradients = gaps(found.gradients, wanted.gradients)
    # A NaN is not within a limit.
    wrong = [name for name, gap in of_gradients.items() if not gap <= limits.gradient]
    wrong.sort(key=lambda name: -of_gradients[name])
    listed = [f"{name} {of_gradients[name]:.1e}" for name in wrong]
    if not all(gap <= limits.loss for gap in apart):
        listed.insert(0, f"losses {', '.join(f'{gap:.1e}' for gap in apart)}")
    if listed:
        more = f" and {len(listed) - 4} more" if len(listed) > 4 else ""
        return f"failed: relative differences of {'; '.join(listed[:4])}{more}"
    return (
        f"ok: relative differences of losses {max(apart):.1e}, "
        f"of gradients {max(of_gradients.values()):.1e}"
    )


def known_trainings() -> dict[str, Training]:
    """Return what runs on a CPU found, by the name of the flag set."""
    stored: dict[str, Any] = json.loads(REFERENCE.read_text()) if REFERENCE.exists() else {}
    return {name: Training(**values) for name, values in stored.items()}


def store(trainings: Mapping[str, Training]) -> None:
    """Write what runs on a CPU found, a line for each parameter."""
    sets = []
    for name, training in trainings.items():
        rows = [f"   {json.dumps(p)}: {json.dumps(s)}" for p, s in training.gradients.items()]
        gradients = ",\n".join(rows)
        sets.append(
            f' {json.dumps(name)}: {{\n  "losses": {json.dumps(training.losses)},\n'
            f'  "gradients": {{\n{gradients}\n  }}\n }}'
        )
    REFERENCE.write_text("{\n" + ",\n".join(sets) + "\n}\n")

"""Measure the time of --check-only, in its own process, for models of known size.

    python -m benchmarks.check_only [--rounds 3] [--against ANOTHER_CHECKOUT]

The command lines are those of the scripts in examples/, with the changes in `CASES`.  With
--against, both checkouts run alternately, and the result is their ratio.  Dated results are in
check_only.md.
"""

from __future__ import annotations

import argparse
import os
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
_V3 = "deepseek_v3/train_deepseek_v3.sh"
_ON_8 = "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 1 --global-batch-size 3072"
_DROPPED = {  # flags of the script that a case omits, with their values
    "DeepSeek-V3, 8 ranks": ("--pipeline-model-parallel-layout",),
    "DeepSeek-V3, 8 ranks, experts one by one": (
        "--pipeline-model-parallel-layout",
        "--moe-grouped-gemm",
        "--moe-permute-fusion",
        "--moe-enable-deepep",
    ),
    "Mixtral 8x22B": ("--num-layers-per-virtual-pipeline-stage",),
}
_LLAMA_405B = (
    "--num-layers 126 --hidden-size 16384 --ffn-hidden-size 53248 --num-attention-heads 128 "
    "--tensor-model-parallel-size 8 --sequence-parallel --pipeline-model-parallel-size 9 "
    "--global-batch-size 2016"
)
_MIXTRAL_8X22B = (
    "--num-layers 56 --hidden-size 6144 --ffn-hidden-size 16384 --num-attention-heads 48"
)
# name -> script, ranks, flags after those of the script
CASES = {
    "DeepSeek-V3, 8 ranks": (_V3, 8, f"{_ON_8} --expert-model-parallel-size 8"),
    "DeepSeek-V3, 8 ranks, experts one by one": (
        _V3,
        8,
        f"{_ON_8} --expert-model-parallel-size 8 --moe-token-dispatcher-type alltoall",
    ),
    "DeepSeek-V3, 1024 ranks": (_V3, 1024, ""),
    "Llama-3 405B, 1008 ranks": ("llama/train_llama3_8b_h100.sh", 1008, _LLAMA_405B),
    "Mixtral 8x22B": ("mixtral/train_mixtral_8x7b_distributed.sh", 64, _MIXTRAL_8X22B),
    "Mamba 8B": ("mamba/train.sh", 8, ""),
    "Mamba 8B, on CPUs": ("mamba/train.sh", 8, "--device cpu"),
    "GPT-3 175B": ("gpt3/train_gpt3_175b_distributed.sh", 128, ""),
    "gpt-oss 20B": ("gpt_oss/train_gpt_oss_20b.sh", 8, ""),
    "BERT 340M": ("bert/train_bert_340m_distributed.sh", 8, ""),
    "T5 220M": ("t5/train_t5_220m_distributed.sh", 8, ""),
}


def words_of(script: str, dropped: tuple[str, ...]) -> list[str]:
    """Return entry program and flags of a script, without ``dropped``."""
    with tempfile.TemporaryDirectory() as folder:
        stand_in, record = Path(folder) / "torchrun", Path(folder) / "words"
        stand_in.write_text(f'#!/bin/bash\nprintf "%s\\n" "$@" >{shlex.quote(str(record))}\n')
        stand_in.chmod(0o755)
        environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
        command = ["bash", str(_ROOT / "examples" / script)]
        subprocess.run(command, check=True, env=environment, cwd=_ROOT)
        words = record.read_text().splitlines()
    words = words[next(i for i, word in enumerate(words) if word.startswith("pretrain_")) :]
    kept, keeps = [], True
    for word in words:
        if word.startswith("--"):
            keeps = word not in dropped
        if keeps:
            kept.append(word)
    return kept


def seconds(checkout: Path, case: str) -> tuple[float, float]:
    """Return CPU and wall time of one process in ``checkout``."""
    script, ranks, more = CASES[case]
    words = words_of(script, _DROPPED.get(case, ()))
    command = [sys.executable, *words, *more.split(), "--check-only"]
    command += ["--check-world-size", str(ranks)]
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False)
    wall, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(f"{case}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return cpu, wall


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--against", type=Path)
    args = parser.parse_args()
    checkouts = [_ROOT, *([args.against] if args.against else [])]
    print("| case | CPU s | wall s | CPU before / after |\n|---|---|---|---|")
    for case in CASES:
        times = [[seconds(c, case) for c in checkouts] for _ in range(args.rounds)]
        cpu = [statistics.median(t[i][0] for t in times) for i in range(len(checkouts))]
        wall = statistics.median(t[0][1] for t in times)
        ratio = f"{cpu[-1] / cpu[0]:.1f}" if args.against else ""
        print(f"| {case} | {cpu[0]:.1f} | {wall:.1f} | {ratio} |", flush=True)


if __name__ == "__main__":
    main()

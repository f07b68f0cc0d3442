"""--deterministic-mode: a run repeated has the same bits, also where threads share a sum."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.support import forked, selection
from tests.support.runs import ROOT, TINY, run_gpt, without_times

BASE = [*TINY, *"--train-iters 3 --deterministic-mode --log-params-hash-interval 1".split()]
DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1"
EXPERTS = "--num-experts 4 --disable-bias-linear --moe-ffn-hidden-size 32"
KINDS = {
    "fp8 of experts, overlapped": (
        f"{EXPERTS} --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall "
        "--overlap-moe-expert-parallel-comm --bf16 --fp8-format hybrid --use-distributed-optimizer "
        "--overlap-grad-reduce --overlap-param-gather"
    ),
    "muon of cut matrices": (
        "--optimizer muon --muon-tp-mode distributed --tensor-model-parallel-size 2 "
        f"--sequence-parallel {DROPOUT}"
    ),
    "4 bits, fully sharded": f"--use-torch-fsdp2 --bf16 --fp4-format e2m1 {DROPOUT}",
    "moments of 8 bits": (
        "--use-distributed-optimizer --bf16 --use-precision-aware-optimizer --exp-avg-dtype fp8 "
        "--exp-avg-sq-dtype fp8 --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1"
    ),
}


@pytest.fixture(autouse=True)
def _fixed_nccl_algorithm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose the algorithm that --deterministic-mode needs on several GPUs."""
    monkeypatch.setenv("NCCL_ALGO", "Ring")


@pytest.mark.feature("Precision: --deterministic-mode repeats a run bit for bit")
@pytest.mark.parametrize("kind", selection.first(2, KINDS))
def test_a_run_repeated_has_the_same_bits(kind: str, tmp_path: Path) -> None:
    first, second = (
        without_times(run_gpt(tmp_path / n, *KINDS[kind].split(), base=BASE, world_size=2))
        for n in "12"
    )
    assert first == second
    assert len({line["params-hash"] for line in first if "lm loss" in line}) == 3


def test_threads_share_sums_in_one_way(tmp_path: Path) -> None:
    """Wide enough that they do."""
    flags = (
        f"{EXPERTS} {DROPOUT} --hidden-size 128 --seq-length 64 --optimizer muon --train-iters 2"
    )
    flags += " --max-position-embeddings 64 --fp8-format hybrid"
    program = (
        "import runpy, torch; torch.set_num_threads(2); "
        "runpy.run_path('pretrain_gpt.py', run_name='__main__')"
    )
    command = [forked.python(), "-c", program, *BASE, *flags.split(), "--metrics-file"]
    seen = []
    for name in ("first", "second"):
        subprocess.run([*command, f"{tmp_path}/{name}"], cwd=ROOT, check=True)
        lines = (tmp_path / name).read_text().splitlines()
        seen.append(without_times([json.loads(line) for line in lines]))
    assert seen[0] == seen[1]
    assert len({line["params-hash"] for line in seen[0] if "lm loss" in line}) == 2

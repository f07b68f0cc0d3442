"""The command line of a GPU, on the device of `tests.support.host_gpu`: the numbers of a CPU.

What it finds: tensors left on the host, collectives that NCCL has not, kernels called otherwise
than they are declared.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.core.optional import why_missing
from tests.support import forked, host_gpu, selection, tolerances
from tests.support.dataset_files import write
from tests.support.ranks import ROOT
from tests.support.runs import TINY, losses, run_gpt

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None or host_gpu.is_asked(),
    reason="compiles a device with g++",
)
LLAMA = "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear"
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-grouped-gemm --moe-aux-loss-coeff 0.01"
SHARDED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
OFFLOADED = "--optimizer-cpu-offload --use-precision-aware-optimizer --use-distributed-optimizer"


@pytest.fixture(scope="module")
def compiled() -> Path:
    return host_gpu.build(ROOT / "build/host_gpu")


def on_the_device(
    folder: Path,
    compiled: Path,
    world_size: int,
    flags: list[str],
    program: str = "pretrain_gpt.py",
    base: Sequence[str] = TINY,
    **environ: str,
) -> list[float]:
    """Losses of a run that is started as a user would start it; its log is ``folder``/log.

    Its processes are forked from one that has found the device, unless ``environ`` is what Triton
    reads when it is imported.
    """
    folder.mkdir()
    metrics = folder / "metrics.jsonl"
    python = forked.python_on_host_gpu(compiled)
    if "TRITON_INTERPRET" in environ:
        python = sys.executable
    start = [python] if world_size == 1 else forked.torchrun(world_size, python)
    command = [*start, "-m", "tests.support.host_gpu", program, *base, *flags]
    ended = subprocess.run(
        [*command, "--device", "cuda", "--metrics-file", str(metrics)],
        cwd=ROOT,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **environ},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-8000:]
    (folder / "log").write_text(ended.stdout)
    return losses([json.loads(line) for line in metrics.read_text().splitlines()])


CASES = {
    "ring of ZeRO": (
        2,
        f"--context-parallel-size 2 {SHARDED} --async-save --save-interval 2",
        torch.float32,
    ),
    "ring in 16 bits": (
        2,
        "--bf16 --context-parallel-size 2 --num-attention-heads 4 --hidden-size 64 "
        "--group-query-attention --num-query-groups 2",
        torch.bfloat16,
    ),
    "windows in a ring": (
        2,
        "--bf16 --context-parallel-size 2 --num-attention-heads 4 --hidden-size 64 "
        "--group-query-attention --num-query-groups 2 --window-size 9,0 --window-attn-skip-freq 2",
        torch.bfloat16,
    ),
    "windows": (1, "--bf16 --window-size 9,0 --num-attention-heads 4", torch.bfloat16),
    "TP, SP and experts": (
        2,
        f"--tensor-model-parallel-size 2 --sequence-parallel {EXPERTS} "
        "--expert-model-parallel-size 2 --expert-tensor-parallel-size 1",
        torch.float32,
    ),
    "collectives of gloo": (
        2,
        f"--distributed-backend gloo --tensor-model-parallel-size 2 --sequence-parallel {EXPERTS} "
        "--expert-model-parallel-size 2 --expert-tensor-parallel-size 1 --bf16",
        torch.bfloat16,
    ),
    "stages": (
        2,
        "--high-priority-stream-groups pp --pipeline-model-parallel-size 2 --mtp-num-layers 1 "
        "--position-embedding-type rope",
        torch.float32,
    ),
    "state on the host": (1, f"--bf16 {OFFLOADED} {RECOMPUTED}", torch.bfloat16),
    "latent attention": (
        2,
        "--bf16 --multi-latent-attention --position-embedding-type rope --qk-head-dim 16 "
        "--qk-pos-emb-head-dim 8 --v-head-dim 16 --num-attention-heads 4 "
        "--tensor-model-parallel-size 2",
        torch.bfloat16,
    ),
    "fp8": (1, "--bf16 --fp8-format hybrid --fp8-param-gather", torch.bfloat16),
}
DEFAULT = ["windows in a ring", "TP, SP and experts", "fp8"]


@pytest.mark.feature("Platforms: the ways of a GPU are walked, and give the numbers of a CPU")
@pytest.mark.parametrize("case", selection.only(DEFAULT, CASES))
def test_a_run_on_the_device_has_the_losses_of_a_cpu(
    tmp_path: Path, compiled: Path, case: str
) -> None:
    world_size, words, dtype = CASES[case]
    flags = [*words.split(), "--train-iters", "3"]
    saved = [["--save", str(tmp_path / where)] if "save" in words else [] for where in "gc"]
    found = on_the_device(tmp_path / "gpu", compiled, world_size, [*flags, *saved[0]])
    cpu = run_gpt(tmp_path / "cpu", *flags, *saved[1], world_size=world_size)
    assert found == pytest.approx(losses(cpu), rel=tolerances.LAYOUT[dtype]["loss"])
    assert not saved[0] or (tmp_path / "g/latest_checkpointed_iteration.txt").read_text() == "3"


@pytest.mark.feature(
    "Attention: documents of a sample (--reset-attention-mask) run in a GPU's flash kernel"
)
def test_documents_on_all_ranks_have_the_losses_of_a_mask(tmp_path: Path, compiled: Path) -> None:
    """Each rank of two stages and two tensor-parallel ranks gets the documents' bounds."""
    random = np.random.default_rng(0)
    lengths = random.integers(1, 24, size=200)
    documents = [[*random.integers(0, 99, size=n - 1).tolist(), 100] for n in lengths]  # 100: end
    prefix = write(tmp_path / "data", documents)
    words = (
        "--bf16 --train-iters 2 --reset-attention-mask --reset-position-ids --split 100,0,0 "
        "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 "
        "--position-embedding-type rope --eval-iters 0 --init-method-std 0.3"
    )
    flags = [*words.split(), "--data-path", prefix]
    base = [flag for flag in TINY if "mask" not in flag and flag != "--mock-data"]
    found = on_the_device(tmp_path / "gpu", compiled, 4, [*flags, "--num-workers", "1"], base=base)
    cpu = losses(run_gpt(tmp_path / "cpu", *flags, world_size=4, base=base))
    assert found == pytest.approx(cpu, rel=tolerances.LAYOUT[torch.bfloat16]["loss"])
    flags.remove("--reset-attention-mask")
    joined = losses(run_gpt(tmp_path / "joined", *flags, world_size=4, base=base))
    for ours, apart, mixed in zip(found, cpu, joined, strict=True):
        assert abs(ours - apart) < abs(mixed - apart) / 4


def test_gemms_over_symmetric_memory_have_the_losses_of_separate_collectives(
    tmp_path: Path, compiled: Path
) -> None:
    """Symmetric memory is emulated; its operations assert what torch needs."""
    flags = "--bf16 --train-iters 3 --tensor-model-parallel-size 2 --sequence-parallel"
    overlap = ["--tp-comm-overlap", "--tp-comm-overlap-rs-dgrad"]
    separate = on_the_device(tmp_path / "separate", compiled, 2, flags.split())
    fused = on_the_device(tmp_path / "fused", compiled, 2, [*flags.split(), *overlap])
    # A bf16 GEMM of the host sums in another order for fewer rows.
    bound = tolerances.LAYOUT[torch.bfloat16]["loss"]
    assert fused == pytest.approx(separate, rel=bound, abs=0)
    assert "--tp-comm-overlap is without effect" not in (tmp_path / "fused/log").read_text()


@pytest.mark.parametrize(
    ("flags", "where"), [("", ":"), ("--first-last-layers-bf16", " on some layers:")]
)
def test_overlap_without_fused_gemms_of_blocks_is_announced(
    tmp_path: Path, compiled: Path, flags: str, where: str
) -> None:
    """The run goes on with separate collectives."""
    recipe = f"--bf16 --fp8-format hybrid --fp8-recipe mxfp8 {flags} --num-layers 3"
    layout = "--tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap"
    words = f"{recipe} {layout} --hidden-size 64 --train-iters 2"
    on_the_device(tmp_path / "run", compiled, 2, words.split())
    log = (tmp_path / "run/log").read_text()
    (line,) = [line for line in log.splitlines() if "--tp-comm-overlap is without" in line]
    assert f"is without effect{where}" in line
    assert "layers in fp8 or fp4, or with adapters, have no fused GEMM" in line


HYBRID = "--num-layers 4 --hybrid-override-pattern M*-E --mamba-num-groups 2 --mamba-head-dim 32"


@pytest.mark.feature(
    "Precision: --deterministic-mode on a GPU uses only operations that torch allows"
)
def test_a_deterministic_run_repeats_itself(tmp_path: Path, compiled: Path) -> None:
    """The device refuses the operations that a GPU refuses, and GEMMs without workspaces."""
    flags = f"--train-iters 2 --deterministic-mode --hidden-size 64 {HYBRID} {EXPERTS} --bf16"
    first, second = (
        on_the_device(
            tmp_path / n, compiled, 1, flags.split(), "pretrain_mamba.py", NCCL_ALGO="Ring"
        )
        for n in "12"
    )
    assert len(first) == 2
    assert first == second


@pytest.mark.skipif(why_missing("triton") is not None, reason="triton is not installed")
def test_kernels_in_triton_are_launched_by_a_run(tmp_path: Path, compiled: Path) -> None:
    flags = [*LLAMA.split(), "--train-iters", "1", "--num-layers", "1", "--global-batch-size", "2"]
    flags += f"{EXPERTS} --moe-router-fusion".split()
    found = on_the_device(tmp_path / "gpu", compiled, 1, flags, TRITON_INTERPRET="1")
    wanted = losses(run_gpt(tmp_path / "cpu", *flags))
    assert found == pytest.approx(wanted, rel=tolerances.LAYOUT[torch.float32]["loss"])


DRAFTS = "--inference-draft-model mtp --inference-num-draft-tokens 2"
GENERATED = {
    "GPT on TP2 and experts, with drafts": (
        2,
        f"--tensor-model-parallel-size 2 --sequence-parallel {EXPERTS} {LLAMA} --mtp-num-layers 1",
        f"--tensor-model-parallel-size 2 {DRAFTS}",
    ),
    "MLA on two stages, with drafts": (
        2,
        "--multi-latent-attention --position-embedding-type rope --mtp-num-layers 1",
        f"--pipeline-model-parallel-size 2 --cache-mla-latents {DRAFTS}",
    ),
}


def waits_of(compiled: Path, script: str) -> dict[str, object]:
    """Run a script of tests/support on the device; return the waits that it prints last."""
    ended = subprocess.run(
        [
            forked.python_on_host_gpu(compiled),
            "-m",
            "tests.support.host_gpu",
            f"tests/support/{script}",
        ],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-8000:]
    waits: dict[str, object] = json.loads(ended.stdout.splitlines()[-1])
    return waits


@pytest.mark.feature("Generation: the host waits once a decode step, for the tokens")
def test_the_host_waits_once_a_decode_step(compiled: Path) -> None:
    waits = waits_of(compiled, "decode_waits.py")
    assert waits == {kind: [1] * 36 for kind in waits}
    assert len(waits) == 7


def test_windows_packed_sequences_and_documents_need_no_mask_on_a_gpu(compiled: Path) -> None:
    waits = waits_of(compiled, "flash_cases.py")
    assert waits == dict.fromkeys(waits, 0)
    assert len(waits) == 54


@pytest.mark.feature(
    "Experts: on a GPU without expert parallelism the host never waits for token counts"
)
def test_the_host_does_not_wait_for_tokens_of_experts(compiled: Path) -> None:
    waits = waits_of(compiled, "expert_waits.py")
    assert waits.pop("one by one, in fp32") == 1  # a GEMM for each expert needs its count
    assert waits == dict.fromkeys(waits, 0)
    assert len(waits) == 12


@pytest.mark.parametrize("name", selection.first(1, GENERATED))
def test_text_of_the_device_is_that_of_a_cpu(name: str, tmp_path: Path, compiled: Path) -> None:
    world_size, of_model, of_engine = GENERATED[name]
    save = str(tmp_path / "ck")
    run_gpt(tmp_path, *of_model.split(), "--save", save, world_size=world_size)
    tool = ["tools/text_generation_cli.py", "--load", save, "--prompt", "5 7 9", "--seed", "1"]
    texts = {}
    on_device = [*forked.torchrun(world_size, forked.python_on_host_gpu(compiled)), "-m"]
    starts = {"cpu": forked.torchrun(world_size), "cuda": [*on_device, "tests.support.host_gpu"]}
    for device, start in starts.items():
        asked = ["--num-tokens", "12", "--device", device, *of_engine.split()]
        ended = subprocess.run(
            [*start, *tool, *asked],
            cwd=ROOT,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-8000:]
        texts[device] = ended.stdout.strip().splitlines()[-1]
    assert texts["cuda"] == texts["cpu"]
    assert texts["cpu"].startswith("5 7 9 ")

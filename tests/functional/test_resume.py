"""20 steps against 10, a kill and 10 more: the same numbers bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.dist_checkpointing.reader import CheckpointReader
from tests.distributed.test_fsdp import SHARD
from tests.support import selection
from tests.support.runs import ANY_LENGTH, run_gpt, without_times

SHORT = "--seq-length 16 --global-batch-size 4 --eval-iters 0 --log-params-norm"
DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1"
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"

FP16 = "--fp16 --loss-scale-window 3 --hysteresis 1"

# What is on -> ranks, flags.
KINDS = {
    "fp32": (1, ""),
    "bf16": (1, "--bf16"),
    "fp16": (1, f"{FP16} --initial-loss-scale 1048576"),
    "activations-on-the-host": (
        1, f"{DROPOUT} --bf16 --cpu-offloading --cpu-offloading-num-layers 1 --loss-chunk-size 7"
    ),
    "fp16-with-nothing-but-skipped-steps-at-first": (1, f"{FP16} --initial-loss-scale 4294967296"),
    "dropout": (2, f"{DROPOUT} --tensor-model-parallel-size 2 --sequence-parallel"),
    "recompute": (1, f"{DROPOUT} {RECOMPUTE}"),
    "virtual-stages": (
        2, "--pipeline-model-parallel-size 2 --num-layers 4 "
        "--num-virtual-stages-per-pipeline-rank 2"
    ),
    "zero-1": (
        2, "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --bf16 "
        "--async-save"
    ),
    "state-in-fewer-bits": (
        2, "--use-distributed-optimizer --bf16 --use-precision-aware-optimizer "
        "--main-grads-dtype bf16 --exp-avg-dtype fp8 --exp-avg-sq-dtype fp8"
    ),
    "state-on-the-host": (
        2, "--use-distributed-optimizer --bf16 --optimizer-cpu-offload "
        "--optimizer-offload-fraction 0.5 --overlap-cpu-optimizer-d2h-h2d "
        "--use-precision-aware-optimizer --exp-avg-dtype bf16"
    ),
    "muon": (
        2, "--optimizer dist_muon --muon-nesterov --swiglu --qk-clip --qk-clip-threshold 0.01"
    ),
    "soap": (
        2, "--optimizer soap --soap-precondition-frequency 2 --use-distributed-optimizer --bf16"
    ),
    "fp8": (
        2, "--fp8-format hybrid --fp8-amax-history-len 4 --bf16 --tensor-model-parallel-size 2 "
        "--sequence-parallel"
    ),
    "fp8-gathered": (
        2, "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --bf16 "
        "--fp8-format hybrid --fp8-param-gather --fp8-amax-history-len 4"
    ),
    "nvfp4": (1, "--fp4-format e2m1 --bf16"),
    # Losses have the same bits; the search for what need not be computed again begins anew.
    "zero-3": (2, f"{SHARD} optim_grads_params"),
    "ramp-up": (1, "--rampup-batch-size 2 2 24 --global-batch-size 6 --train-samples 90"),
    "decoupled-lr": (
        1, "--decoupled-lr 4e-3 --decoupled-min-lr 1e-4 --untie-embeddings-and-output-weights "
        "--use-mup --mup-base-hidden-size 8"
    ),
    "bert": (
        2, f"--model-kind bert {DROPOUT} --tensor-model-parallel-size 2 --sequence-parallel"
    ),
    "hybrid": (
        2, "--model-kind mamba --mamba-state-dim 4 --mamba-head-dim 8 --mamba-num-groups 2 "
        f"--hybrid-override-pattern M* --tensor-model-parallel-size 2 {DROPOUT}"
    ),
    "experts": (
        2, "--num-experts 4 --expert-model-parallel-size 2 --moe-router-score-function sigmoid "
        "--moe-router-enable-expert-bias --disable-bias-linear --async-save"
    ),
    "t5": (
        3, f"--model-kind t5 {DROPOUT} --decoder-seq-length 12 --position-embedding-type relative "
        "--pipeline-model-parallel-size 3 --encoder-pipeline-model-parallel-size 1 --bf16 "
        "--decoder-num-layers 3"
    ),
}  # fmt: skip


def content(folder: Path, world_size: int) -> tuple[dict[str, torch.Tensor], list[Any]]:
    """Weights, moments and whatever else is a tensor; counters, scheduler and random states."""
    with CheckpointReader(folder) as reader:
        tensors = {key: reader.read(key) for key in reader.tensors}
        common = reader.common()
        rest = [common[key] for key in ("counters", "optimizer", "opt_param_scheduler")]
        return tensors, rest + [reader.rank_state(rank) for rank in range(world_size)]


DEFAULT = (
    "bf16",
    "dropout",
    "fp16-with-nothing-but-skipped-steps-at-first",
    "virtual-stages",
    "state-in-fewer-bits",
    "zero-3",
    "ramp-up",
    "experts",
)  # of `make test`


@pytest.mark.feature("Checkpoints: a run that is killed goes on bit for bit")
@pytest.mark.parametrize("kind", selection.only(DEFAULT, KINDS))
def test_a_killed_run_goes_on_bit_for_bit(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The unbroken run is killed when step 20 is on disk, but not published: 10 steps are lost."""
    world_size, flags = KINDS[kind]
    how_long = [] if "--train-samples" in flags else ["--train-iters", "20"]
    base = [*ANY_LENGTH, *how_long, *SHORT.split(), *flags.split()]
    root = tmp_path / "ck"
    base += ["--save-interval", "10", "--save", str(root), "--load", str(root)]
    monkeypatch.setenv("FAULTS", "save.before_rename:kill:step20")
    with pytest.raises(AssertionError, match="SIGKILL"):
        run_gpt(tmp_path, base=base, world_size=world_size)
    monkeypatch.delenv("FAULTS")
    straight = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    (unpublished,) = root.glob("iter_0000020.tmp-*")
    expected, expected_rest = content(unpublished, world_size)
    resumed = run_gpt(tmp_path, base=base, world_size=world_size)
    assert without_times(resumed) == without_times(straight)
    assert [line["iteration"] for line in resumed] == list(range(1, 21))
    assert [line["time"] == old["time"] for line, old in zip(resumed, straight, strict=True)] == (
        [True] * 10 + [False] * 10
    )
    found, found_rest = content(root / "iter_0000020", world_size)
    assert found_rest == expected_rest
    assert found.keys() == expected.keys()
    assert sum(key.startswith("optimizer.state.exp_avg_sq.") for key in found) > 5
    assert all(torch.equal(found[key], expected[key]) for key in expected)

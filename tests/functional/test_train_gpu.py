"""benchmarks/train_gpu.py is ready to run: on a CPU its contenders agree, and its table is made."""

from __future__ import annotations

import pytest

from benchmarks.gpu_contenders import (
    ACCUMULATION,
    SHAPES,
    PeerTrainer,
    _plain,
    flags,
    make_trainer,
)
from benchmarks.train_gpu import loss_gap, table
from megatron.core import device
from tests.ranks import run_ranks


def losses(rank: int, world_size: int, name: str, shape: str) -> list[float]:
    device.choose("cpu")
    if name == "plain":
        trainer = PeerTrainer(_plain(SHAPES[shape]), SHAPES[shape], is_compiled=False)
    else:
        trainer = make_trainer(name, SHAPES[shape], "")
    return [float(trainer.step()) for _ in range(4)]


@pytest.mark.parametrize("shape", ["tiny", "tiny-llama", "tiny-moe"])
def test_fp8_follows_bf16(shape: str) -> None:
    ours, fp8 = (run_ranks(losses, 1, name, shape)[0] for name in ("ours", "ours-fp8"))
    assert ours[0] != fp8[0]
    assert loss_gap(ours, fp8) < 0.01


def test_all_contenders_accumulate_as_many_micro_batches() -> None:
    shape = SHAPES["tiny"]
    words = flags(shape, "ours")
    batch, total = (words[words.index(f"--{n}-batch-size") + 1] for n in ("micro", "global"))
    assert (int(batch), int(total)) == (shape.batch, ACCUMULATION * shape.batch)
    device.choose("cpu")
    trainer = PeerTrainer(_plain(shape), shape, is_compiled=False)
    used = []
    trainer.model.register_forward_pre_hook(lambda _, given: used.append(given[0].shape))
    trainer.step()
    assert used == [(shape.batch, shape.seq)] * ACCUMULATION


def test_a_row_says_how_far_its_losses_are_from_ours() -> None:
    found = {"product": {"losses": [1e12], "step_s": []}}
    for name in ("ours", "plain"):
        (seen,) = run_ranks(losses, 1, name, "tiny")
        found[name] = {"losses": seen, "step_s": [0.5, 0.1, 0.2], "peak": 2**30, "failed": None}
    found["other"] = {**found["plain"], "losses": [2 * x for x in found["ours"]["losses"]]}
    found["large"] = {"losses": [], "step_s": [], "peak": 0.0, "failed": "out of memory"}
    *_, ours, plain, other, large = table(SHAPES["tiny"], found)
    assert ours.startswith("| ours | 5,120 | ")
    assert "VOID" not in plain
    assert "VOID" in other
    assert large == "| large | out of memory | | | | | | |"

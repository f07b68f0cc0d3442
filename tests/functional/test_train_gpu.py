"""benchmarks/train_gpu.py is ready to run: on a CPU its contenders agree, and its table is made."""

from __future__ import annotations

from argparse import Namespace

import pytest

from benchmarks import train_gpu
from benchmarks.gpu_contenders import (
    ACCUMULATION,
    SHAPES,
    PeerTrainer,
    Shape,
    _plain,
    flags,
    make_trainer,
)
from benchmarks.train_gpu import loss_gap, table
from megatron.core import device
from tests.support.ranks import run_ranks


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
    *_, ours, plain, other, large = table(SHAPES["tiny"], found.items())
    assert ours.startswith("| ours | 5,120 | ")
    assert "VOID" not in plain
    assert "VOID" in other
    assert large == "| large | out of memory | | | | | | |"


def test_every_shape_has_its_first_contender_before_any_has_its_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A lease may end before the last contender; one that no time is left for does not start."""
    started = []

    class Instant:
        def __init__(self, asked: object, shape: Shape, name: str, limit_s: float) -> None:
            started.append((shape.name, name, limit_s))
            self.found: dict[str, object] = {}

        def turn(self) -> None:
            pass

        stop = turn

    asked = Namespace(
        contenders="ours,other", total_s=50.0, limit_s=90.0, rounds=1, output=None, shape=""
    )
    with monkeypatch.context() as patch:
        patch.setattr(train_gpu, "Worker", Instant)
        found = list(train_gpu.measure(asked, [SHAPES["tiny"], SHAPES["tiny-llama"]]))
    assert [names[:2] for names in started] == [
        ("tiny", "product"),
        ("tiny", "ours"),
        ("tiny-llama", "ours"),
        ("tiny", "other"),
        ("tiny-llama", "other"),
    ]
    assert all(limit_s <= 50 for *_, limit_s in started)
    assert [name for _, name, _ in found] == [name for _, name, _ in started]
    asked = Namespace(device="cpu", ours="", steps=1, warmup=1)
    late = train_gpu.Worker(asked, SHAPES["tiny"], "ours", 1.0)
    late.turn()
    late.stop()
    assert late.found["failed"] == "skipped: no time is left"

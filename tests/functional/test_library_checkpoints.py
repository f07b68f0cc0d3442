"""Checkpoints of the application in the library, and those of the library in the application."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from tests.support import selection
from tests.support.runs import losses, run_gpt

_FLAGS = (
    "--train-iters 4 --save-interval 2 --eval-iters 0 --swiglu --disable-bias-linear --num-experts "
    "2 --moe-token-dispatcher-type alltoall"
).split()
_KINDS = "safetensors_dist", "torch_dist"


@pytest.mark.feature("Library: a run goes on from a checkpoint that dist_checkpointing has saved")
@pytest.mark.parametrize(("kind", "other"), selection.first(1, [_KINDS, _KINDS[::-1]]))
def test_what_a_run_saved_goes_through_the_library_into_another_run(
    tmp_path: Path, kind: str, other: str
) -> None:
    two_ranks = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
    saved = [*_FLAGS, *two_ranks, "--save", str(tmp_path / "a"), "--ckpt-format", kind]
    whole = run_gpt(tmp_path / "run", *saved, world_size=2)
    folder = tmp_path / "a/iter_0000002"
    tensors = dist_checkpointing.load_plain_tensors(folder)
    described = dist_checkpointing.load_tensors_metadata(folder)
    assert {key: entry.global_shape for key, entry in described.items()} == {
        key: tuple(tensor.shape) for key, tensor in tensors.items()
    }
    assert tensors["decoder.layers.mlp.experts.experts.linear_fc1.weight"].shape[:2] == (2, 2)
    state: dict[str, Any] = {
        key: ShardedTensor.from_rank_offsets(key, tensor) for key, tensor in tensors.items()
    }
    state |= dist_checkpointing.load_common_state_dict(folder)
    root = tmp_path / "b"
    (root / "iter_0000002").mkdir(parents=True)
    dist_checkpointing.save(state, root / "iter_0000002", (other, 1))
    (root / "latest_checkpointed_iteration.txt").write_text("2")
    again = dist_checkpointing.load_plain_tensors(root / "iter_0000002")
    assert all(torch.equal(again[key], tensor) for key, tensor in tensors.items())
    resumed = run_gpt(root / "run", *_FLAGS, "--load", str(root), "--no-load-rng")
    assert losses(resumed) == pytest.approx(losses(whole)[2:], rel=1e-5)

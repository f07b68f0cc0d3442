"""Checkpoints between random layouts; `make fuzz-reshard N=50` draws more, on up to 8 ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.reshard import differences, draw

# Small ones that have most axes between them.
SEEDS = (2, 16)  # fp4, fully sharded; torch_dist, experts, Muon
# torch, offloaded; fully sharded fp8; fp4 of experts; T5; context parallel; ZeRO
SLOW_SEEDS = (6, 5, 7, 9, 10, 12)


@pytest.mark.feature("Checkpoints: a fuzzer loads in random layouts what random others have saved")
@pytest.mark.parametrize(
    "seed", [*SEEDS, *(pytest.param(seed, marks=pytest.mark.slow) for seed in SLOW_SEEDS)]
)
def test_what_one_layout_saved_is_what_another_loads(tmp_path: Path, seed: int) -> None:
    pair = draw(seed, max_ranks=4)
    print(pair)
    assert differences(pair, tmp_path) == []

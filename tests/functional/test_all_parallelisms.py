"""Eight ranks in every kind of layout at once: the real command line, one process's numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import tolerances
from tests.support.runs import TINY, losses, run_gpt

# The later of two equal flags counts.
EIGHT_LAYERS = [
    *TINY,
    *"--num-layers 8 --global-batch-size 16 --train-iters 3 --eval-interval 3".split(),
    *"--log-params-norm --log-num-zeros-in-grad --disable-bias-linear".split(),
]
KEYS = ("lm loss", "grad-norm", "params-norm", "num-zeros", "lm loss validation")
LAYOUTS = {
    "TP2 PP2 CP2": (
        "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 "
        "--context-parallel-size 2"
    ),
    "PP4 VPP2": "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2",
    "DP8, parameters sharded": (
        "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params"
    ),
}


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_gpt(tmp_path_factory.mktemp("one"), base=EIGHT_LAYERS)


@pytest.mark.feature("Layouts: GPT trains to the same losses on 8 ranks (TP2 PP2 CP2, PP4 VPP2)")
@pytest.mark.parametrize("name", LAYOUTS)
def test_eight_ranks_print_the_numbers_of_one_process(
    tmp_path: Path, one_process: list[dict[str, Any]], name: str
) -> None:
    flags = LAYOUTS[name].split()
    found = run_gpt(tmp_path, *flags, base=EIGHT_LAYERS, world_size=8, timeout_s=240)
    for key in KEYS:
        assert losses(one_process, key)
        torch.testing.assert_close(
            torch.tensor(losses(found, key), dtype=torch.float64),
            torch.tensor(losses(one_process, key), dtype=torch.float64),
            **tolerances.LAYOUT_LOSS,
        )

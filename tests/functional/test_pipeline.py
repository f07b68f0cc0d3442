"""The real command line with pipeline stages: the losses of one process, and resuming to them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.functional.test_pretrain_gpt import steps
from tests.support import tolerances
from tests.support.runs import TINY, losses, run_gpt

FOUR_LAYERS = [*TINY, "--num-layers", "4", "--eval-interval", "3", "--log-params-norm"]
VIRTUAL = "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"
KEYS = ("lm loss", "grad-norm", "params-norm", "lm loss validation", "lm loss test")


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_gpt(tmp_path_factory.mktemp("one"), base=FOUR_LAYERS)


@pytest.mark.feature("Layouts: GPT trains to the same losses in pipeline stages")
@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (2, "--pipeline-model-parallel-size 2 --no-overlap-p2p-communication"),
        (4, f"{VIRTUAL} --overlap-grad-reduce --ddp-bucket-size 4000"),
        (
            4,
            "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel "
            "--timing-log-level 2 --defer-embedding-wgrad-compute",
        ),
    ],
)
def test_stages_print_the_losses_of_one_process(
    tmp_path: Path, one_process: list[dict[str, Any]], ranks: int, layout: str
) -> None:
    found = run_gpt(tmp_path, *layout.split(), base=FOUR_LAYERS, world_size=ranks)
    for key in KEYS:
        assert losses(one_process, key)
        torch.testing.assert_close(
            torch.tensor(losses(found, key)),
            torch.tensor(losses(one_process, key)),
            **tolerances.LAYOUT_LOSS,
        )


def test_a_killed_run_with_virtual_stages_and_dropout_resumes_to_the_same_numbers(
    tmp_path: Path,
) -> None:
    base = [*FOUR_LAYERS, *VIRTUAL.split(), "--hidden-dropout", "0.1"]
    straight = steps(run_gpt(tmp_path / "straight", base=base, world_size=2))
    folder = tmp_path / "killed"
    flags = ["--save", str(folder / "ck"), "--load", str(folder / "ck"), "--save-interval", "2"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAULTS", "step.before:kill:rank1:step3")
        with pytest.raises(AssertionError, match="SIGKILL"):
            run_gpt(folder, *flags, base=base, world_size=2)
    assert steps(run_gpt(folder, *flags, base=base, world_size=2)) == straight

"""--rehearse-memory takes the memory of the worst step first, and leaves no other trace."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.ranks import run_ranks
from tests.support.runs import TINY, heard, run_gpt, without_times

DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1 --eval-interval 2 --train-samples 40"
RAMP = f"{DROPOUT} --rampup-batch-size 4 4 16 --lr-decay-samples 40"
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --moe-router-load-balancing-type seq_aux_loss "
    "--moe-aux-loss-coeff 0.01 --moe-grouped-gemm"
)
DELAYED = "--bf16 --fp8-format hybrid --fp8-recipe delayed --fp8-amax-history-len 4"
CASES = {
    "pipeline": (f"{RAMP} --pipeline-model-parallel-size 2", 2),
    "experts": (f"{RAMP} {EXPERTS} --use-distributed-optimizer --overlap-grad-reduce", 2),
    "fp8": (f"{RAMP} {DELAYED}", 1),
}


def base() -> list[str]:
    """TINY in samples, for a ramp-up."""
    words = list(TINY)
    at = words.index("--train-iters")
    return words[:at] + words[at + 2 :]


@pytest.mark.feature("Memory: --rehearse-memory meets the peak before step 1 and changes no bit")
@pytest.mark.parametrize("case", CASES)
def test_a_rehearsal_changes_no_number(case: str, tmp_path: Path) -> None:
    words, world_size = CASES[case]
    plain, rehearsed = (
        run_gpt(tmp_path / name, *words.split(), *more, world_size=world_size, base=base())
        for name, more in (("plain", ()), ("rehearsed", ("--rehearse-memory",)))
    )
    assert without_times(rehearsed) == without_times(plain)


def test_it_takes_as_many_micro_batches_as_the_batch_will_have() -> None:
    argv = [*base(), *RAMP.split(), "--rehearse-memory"]
    ((lines, complaint),) = run_ranks(heard, 1, argv)
    assert complaint == ""
    (told,) = (i for i, line in enumerate(lines) if line.startswith("rehearsed 4 micro-batches: "))
    assert told < lines.index("training ...")

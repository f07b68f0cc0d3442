"""What a micro-batch, once it is read, sends between host and device: nothing.

A plan takes the ways of a GPU on tensors without memory, so that it shows who crosses over.
"""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.training.planning import rank
from tests.support.command_lines import run_of
from tests.support.graph_stand_in import waits


class _Crossings(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = tree_leaves((args, kwargs))
        here, there = (
            {t.device.type for t in x if isinstance(t, Tensor)}
            for x in (given, tree_leaves(result))
        )
        if here | there == {"cpu", "meta"} or (here == {"meta"} and waits(func, given)):
            self.found.append(str(func))
        return result


@pytest.mark.feature("Speed: inside a micro-batch nothing is sent between host and device")
@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (1, "--position-embedding-type alibi"),
        (1, "--position-embedding-type rope --window-size 8,0 --reset-attention-mask"),
        (2, "--position-embedding-type rope --context-parallel-size 2 --cp-comm-type a2a"),
        (2, "--tensor-model-parallel-size 2 --sequence-parallel --hidden-dropout 0.1"),
        (2, "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"),
        (1, "--model-kind t5"),
    ],
)
def test_nothing_crosses_over(monkeypatch: pytest.MonkeyPatch, ranks: int, words: str) -> None:
    crossings = _Crossings()
    run_pass = rank.Executor.do

    def watched(executor: Any, work: Any) -> Any:
        if work.microbatch == 0:  # makes what is kept
            return run_pass(executor, work)
        with crossings:
            return run_pass(executor, work)

    monkeypatch.setattr(rank.Executor, "do", watched)
    rank.cost_of_rank(run_of(f"--bf16 {words}", ranks), 0, 128)
    assert crossings.found == []

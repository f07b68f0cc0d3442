"""Fully sharded runs compute what one process computes."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tests.support import selection
from tests.support.layouts import must_agree
from tools.dev.lib.layout_axes import Case, Sizes, case_of

SHARD = "--use-megatron-fsdp --data-parallel-sharding-strategy"
INSTANCES = "--num-distributed-optimizer-instances 2"
# What `test_layout_fuzz.py` has no feature for: flags, the features beside them, sizes.
LAYOUTS = {
    "a vocabulary and widths that four ranks do not divide": (
        "--use-torch-fsdp2", "dp swiglu gqa rms-norm no-bias rope", Sizes(dp=4, vocab=66),
    ),
    "gradients sharded": (
        f"{SHARD} optim_grads", "dp tp untied", Sizes(microbatches=3),
    ),
    "parameters sharded over cp": (
        f"{SHARD} optim_grads_params", "dp cp-p2p per-token-loss padded", Sizes(),
    ),
    "instances": (f"{SHARD} optim_grads {INSTANCES}", "dp cp-p2p untied", Sizes()),
    "instances that share the optimizer": (
        f"{SHARD} optim_grads_params {INSTANCES} --enable-full-sharding-in-hsdp", "dp swiglu",
        Sizes(dp=4),
    ),
    "stages": ("--use-torch-fsdp2", "pp dp untied", Sizes(microbatches=3)),
    "stages that share a vocabulary that replicas do not divide": (
        "--use-torch-fsdp2", "pp dp tied clip", Sizes(vocab=65, microbatches=3),
    ),
    "virtual stages of instances": (
        f"{SHARD} optim_grads_params {INSTANCES}", "pp interleaved dp", Sizes(dp=4),
    ),
    "stages of instances that keep weights and share the optimizer": (
        f"{SHARD} optim_grads {INSTANCES} --enable-full-sharding-in-hsdp",
        "pp dp padded per-token-loss", Sizes(dp=4, microbatches=3),
    ),
}  # fmt: skip
DEFAULT = [  # each strategy, with and without stages and instances
    "a vocabulary and widths that four ranks do not divide",
    "stages of instances that keep weights and share the optimizer",
]


@dataclass(frozen=True)
class Sharded(Case):
    """A layout of which ``flags`` say more than its features."""

    flags: str = ""

    def command(self) -> list[str]:
        return [*super().command(), *self.flags.split()]


def sharded(flags: str, features: str, sizes: Sizes) -> Sharded:
    return Sharded(case_of(features.split(), sizes).features, sizes, flags)


@pytest.mark.feature("Data parallel: parameters, gradients and optimizer sharded by FSDP2")
@pytest.mark.feature("Data parallel: --use-megatron-fsdp shards what its strategy names")
@pytest.mark.feature("Data parallel: instances of a sharded model (HSDP) may share the optimizer")
@pytest.mark.parametrize("name", selection.only(DEFAULT, LAYOUTS))
def test_sharded_replicas_give_the_answer_of_one_process(name: str) -> None:
    must_agree(sharded(*LAYOUTS[name]))

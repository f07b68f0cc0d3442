"""Fully sharded runs compute what one process computes."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tests.distributed.layouts import must_agree
from tools.layout_axes import Case, Sizes, case_of

LAYOUTS = {
    "untied, micro-batches": ("fsdp2 untied", Sizes(microbatches=3)),
    "kept between forward and backward": ("fsdp2-kept", Sizes(microbatches=3)),
    "four ranks, a vocabulary and widths that they do not divide": (
        "fsdp2 swiglu gqa rms-norm no-bias rope",
        Sizes(dp=4, vocab=66),
    ),
    "with tensor and sequence parallelism": ("fsdp2 sp swiglu", Sizes()),
    "layers computed again": ("fsdp2 recompute-full", Sizes()),
    "parts computed again": ("fsdp2-kept recompute-selective", Sizes()),
    "loss per token": ("fsdp2 per-token-loss padded eod-mask", Sizes()),
}
SHARD = "--use-megatron-fsdp --data-parallel-sharding-strategy"
INSTANCES = "--num-distributed-optimizer-instances 2"
STRATEGIES = {
    "no_shard": (f"{SHARD} no_shard", "dp", Sizes()),
    "optim": (f"{SHARD} optim", "dp", Sizes(dp=4)),
    "optim_grads": (f"{SHARD} optim_grads", "dp tp untied", Sizes(microbatches=3)),
    "optim_grads_params": (f"{SHARD} optim_grads_params", "dp cp-p2p swiglu", Sizes()),
    "optim_grads in bf16": (f"{SHARD} optim_grads", "dp bf16", Sizes(dp=4)),
    "optim_grads_params in bf16": (f"{SHARD} optim_grads_params", "dp bf16 sgd", Sizes()),
}
SEVERAL_INSTANCES = {
    "optim_grads": (f"{SHARD} optim_grads {INSTANCES}", "dp untied", Sizes(dp=4)),
    "optim_grads_params": (
        f"{SHARD} optim_grads_params {INSTANCES}", "dp", Sizes(dp=4, microbatches=3),
    ),
    "fsdp2 with tp": (f"--use-torch-fsdp2 {INSTANCES}", "dp sp", Sizes(dp=4)),
    "optimizer shared, in bf16": (
        f"{SHARD} optim_grads {INSTANCES} --enable-full-sharding-in-hsdp", "dp bf16", Sizes(dp=4),
    ),
    "optimizer shared, with tp": (
        f"{SHARD} optim_grads_params {INSTANCES} --enable-full-sharding-in-hsdp",
        "dp sp swiglu", Sizes(dp=4),
    ),
    "per token over cp": (
        f"{SHARD} optim_grads {INSTANCES}", "dp cp-p2p per-token-loss padded", Sizes(),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Sharded(Case):
    """A layout of which ``flags`` say more than its features."""

    flags: str = ""

    def command(self) -> list[str]:
        return [*super().command(), *self.flags.split()]


def sharded(flags: str, features: str, sizes: Sizes) -> Sharded:
    return Sharded(case_of(features.split(), sizes).features, sizes, flags)


@pytest.mark.feature("Data parallel: parameters, gradients and optimizer sharded by FSDP2")
@pytest.mark.parametrize("name", LAYOUTS)
def test_sharded_replicas_give_the_answer_of_one_process(name: str) -> None:
    features, sizes = LAYOUTS[name]
    must_agree(case_of(features.split(), sizes))


@pytest.mark.feature("Data parallel: --use-megatron-fsdp shards what its strategy names")
@pytest.mark.parametrize("name", STRATEGIES)
def test_each_strategy_gives_the_answer_of_one_process(name: str) -> None:
    must_agree(sharded(*STRATEGIES[name]))


@pytest.mark.feature("Data parallel: several instances of a sharded model (HSDP)")
@pytest.mark.parametrize("name", SEVERAL_INSTANCES)
def test_instances_of_a_sharded_model_give_the_answer_of_one_process(name: str) -> None:
    must_agree(sharded(*SEVERAL_INSTANCES[name]))

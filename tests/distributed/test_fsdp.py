"""Fully sharded runs compute what one process computes."""

from __future__ import annotations

import pytest

from tests.distributed.layouts import must_agree
from tools.layout_axes import Sizes, case_of

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


@pytest.mark.feature("Data parallel: parameters, gradients and optimizer sharded by FSDP2")
@pytest.mark.parametrize("name", LAYOUTS)
def test_sharded_replicas_give_the_answer_of_one_process(name: str) -> None:
    features, sizes = LAYOUTS[name]
    must_agree(case_of(features.split(), sizes))

"""Plans of latent attention on a GPU: values of their own width where cuDNN documents kernels."""

from __future__ import annotations

import pytest

from megatron.training.planning.rank import cost_of_rank
from tests.support.command_lines import run_of

TOKENS = 64
ROWS = 2
HEADS = 4
LAYERS = 2
MLA = (
    "--bf16 --multi-latent-attention --position-embedding-type rope --attention-dropout 0 "
    f"--seq-length {TOKENS} --max-position-embeddings {TOKENS} --num-attention-heads {HEADS} "
    f"--num-layers {LAYERS} --micro-batch-size {ROWS} --qk-pos-emb-head-dim 64 --v-head-dim 128"
)


def kept(words: str) -> int:
    """Bytes that the forward pass of a micro-batch keeps."""
    cost = cost_of_rank(run_of(f"{MLA} {words}"), 0, 128)
    return next(p.kept for (kind, _), p in cost.passes.items() if kind == "forward")


@pytest.mark.feature("Plan: MLA's values of 128 are not padded to keys of 192 on a GPU")
def test_a_plan_counts_values_of_their_own_width() -> None:
    """Padding keeps values and outputs in the width of keys, and outputs in their own again."""
    own = kept("--qk-head-dim 128")
    padded = kept("--qk-head-dim 128 --attention-backend flash")
    of_layer = TOKENS * ROWS * HEADS * 2 * ((192 - 128) + 192)
    of_layer -= 2 * 8  # cuDNN's state of dropout, which a plan of flash attention leaves out
    assert padded - own == LAYERS * of_layer


def test_a_plan_pads_values_of_other_widths() -> None:
    assert kept("--qk-head-dim 96") == kept("--qk-head-dim 96 --attention-backend flash")

"""BERT computes in every layout what one process computes."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tests.support import selection
from tests.support.layouts import must_agree
from tools.dev.lib.layout_axes import Case, case_of

# Features of tools/dev/lib/layout_axes.py, and flags of BERT.
CASES = {
    "sequence-parallel": ("tp sp untied", ""),
    "virtual-stages": ("tp sp pp interleaved tied", ""),
    "zero-bubble": ("pp zb-h1 no-clip", ""),
    "published-layout": (
        "tp pp recompute-full per-token-loss", "--apply-residual-connection-post-layernorm"
    ),
    "one-text": ("dp zero-1 overlap-grad-reduce overlap-param-gather", "--bert-no-binary-head"),
    "rope": ("dp fsdp2 rope recompute-selective", "--mask-prob 0.4"),
}  # fmt: skip


@dataclass(frozen=True)
class BertCase(Case):
    """Losses are means over the hidden tokens of a micro-batch: it is the same in one process."""

    flags: str = ""

    def command(self) -> list[str]:
        """Arguments of ``pretrain_bert.py``."""
        return [*super().command(), "--model-kind", "bert", *self.flags.split()]

    def command_alone(self) -> list[str]:
        """The same in one process."""
        alone = [*super().command_alone(), "--model-kind", "bert", *self.flags.split()]
        return [*alone, "--micro-batch-size", str(self.sizes.micro)]


@pytest.mark.feature("Layouts: BERT under TP, SP, PP, virtual stages, ZeRO and FSDP")
@pytest.mark.parametrize(
    "name", selection.only(["virtual-stages", "published-layout", "rope"], CASES)
)
def test_a_layout_gives_the_answer_of_one_process(name: str) -> None:
    features, flags = CASES[name]
    must_agree(BertCase(case_of(features.split()).features, flags=flags))

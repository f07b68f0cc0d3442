"""Adapters in every layout: the losses, gradients and weights of one process."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from unittest import mock

import pytest

from megatron.core.params.param_init import Init
from megatron.core.peft import lora
from tests.support import layouts, selection
from tests.support.layouts import Trace, must_agree
from tools.dev.lib.layout_axes import Case, Sizes, case_of

_EVERYWHERE = "--lora-target-modules all-linear word_embeddings output_layer"
CASES = {
    "tensor-parallel": ("tp swiglu gqa untied", _EVERYWHERE),
    "sequence-parallel": ("tp sp swiglu gqa untied", _EVERYWHERE),
    "tied-stages": ("tp sp pp tied", _EVERYWHERE),
    "zero-bubble": ("pp zb-h1 gqa", "--lora-target-modules q_proj v_proj down_proj"),
    "zero-1": ("tp sp dp zero-1 swiglu", ""),
    "zero-1-in-bf16": ("tp sp dp zero-1 swiglu bf16", _EVERYWHERE),
    "experts-in-bf16": ("tp sp ep dp zero-1 experts swiglu bf16", ""),
    "fsdp2": ("tp dp fsdp2 untied", _EVERYWHERE),
    "fsdp2-on-meta": ("dp fsdp2", "--init-model-with-meta-device"),
    "expert-parallel": ("ep experts swiglu", ""),
    "expert-tensor-parallel": ("tp sp ep etp experts swiglu", ""),
    "latent-attention": ("tp sp mla", ""),
    "hybrid": ("tp sp hybrid", ""),
    "recomputed": ("tp recompute-full", ""),
    "context-parallel": ("cp-p2p gqa", ""),
    "multi-token-prediction": ("pp tokens-ahead rope", ""),
    "dora": ("tp sp pp swiglu gqa untied", "--lora-use-dora"),
    "saved-modules": (
        "tp sp pp dp zero-1 untied",
        "--lora-modules-to-save lm_head embed_tokens norm input_layernorm",
    ),
    "dora-zero-1": (
        "tp dp zero-1 untied",
        "--lora-use-dora --lora-target-modules q_proj linear_proj linear_fc1 lm_head",
    ),
    "dora-latent-attention": ("tp sp mla", "--lora-use-dora"),
    "dora-hybrid": ("tp sp hybrid", "--lora-use-dora"),
    "shared-experts": ("tp sp ep-in-tp experts shared-expert-overlap", ""),
}


class _WithAdapters(Case):
    """A case with adapters in both runs."""

    flags = ""

    def command(self) -> list[str]:
        return [*super().command(), *self.flags.split()]

    def command_alone(self) -> list[str]:
        return [*super().command_alone(), *self.flags.split()]


def trace(
    rank: int, world_size: int, argv: Sequence[str], padded: bool, in_double: bool
) -> list[Trace]:
    """As `layouts.trace`, but no matrix of an adapter begins with zeros: all have gradients."""
    with mock.patch.object(lora, "START", Init("normal", 0.2)):
        return layouts.trace(rank, world_size, argv, padded, in_double)


DEFAULT = (
    "tied-stages",
    "zero-1-in-bf16",
    "fsdp2-on-meta",
    "expert-tensor-parallel",
    "latent-attention",
    "context-parallel",
    "dora",
    "saved-modules",
    "dora-zero-1",
)  # of `make test`


@pytest.mark.feature("LoRA: every layout trains adapters like one process")
@pytest.mark.parametrize("name", selection.only(DEFAULT, CASES))
def test_a_layout_trains_adapters_like_one_process(name: str) -> None:
    features, flags = CASES[name]
    case = _WithAdapters(**vars(case_of([*features.split(), "adam"], Sizes())))
    object.__setattr__(case, "flags", f"--lora-rank 3 --lora-alpha 6 {flags}")
    with mock.patch.object(layouts, "trace", trace):
        must_agree(case)


@pytest.mark.parametrize(
    ("format", "layout"),
    selection.only(
        [("fp8", "tp sp"), ("int8", "pp dp zero-1"), ("nvfp4", "tp sp")],
        itertools.product(["fp8", "int8", "nvfp4"], ["tp sp", "pp dp zero-1"]),
    ),
)
def test_a_layout_trains_above_a_stored_base_like_one_process(layout: str, format: str) -> None:
    """The width of a rank's weight holds complete blocks, so that all layouts store one base."""
    case = case_of([*layout.split(), "adam", "swiglu"], Sizes())
    adapted = _WithAdapters(**vars(case))
    sizes = "--hidden-size 256 --ffn-hidden-size 256 --lora-rank 3 --lora-alpha 6"
    object.__setattr__(adapted, "flags", f"{sizes} --lora-base-dtype {format}")
    with mock.patch.object(layouts, "trace", trace):
        must_agree(adapted)

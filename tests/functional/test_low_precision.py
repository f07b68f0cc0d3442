"""Whole runs with products of 8 bits: any layout, any kind of layer, beside 16 bits."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

from megatron.training.conversion.convert import HF, ConversionRequest, convert
from tests.support import selection, tolerances
from tests.support.layouts import Trace, compare, trace
from tests.support.ranks import run_ranks
from tests.support.runs import TINY, losses, refusal, run_gpt

SHORT = [*TINY, *"--train-iters 3 --eval-iters 0".split()]
DELAYED = "--fp8-format hybrid --fp8-amax-history-len 2 --fp8-amax-compute-algo max"
TENSORWISE = "--fp8-format hybrid --fp8-recipe tensorwise"
MXFP8 = "--fp8-format e4m3 --fp8-recipe mxfp8"
WIDE = "--hidden-size 64 --ffn-hidden-size 128 --lr-decay-style constant --log-params-norm"
LAYOUTS = {
    "tp sp dp": (DELAYED, 4, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "pp zero-1": (
        DELAYED, 4,
        "--pipeline-model-parallel-size 2 --pipeline-schedule zb-h1 --use-distributed-optimizer",
    ),
    "tp sp of blocks": (MXFP8, 2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "sharded": (MXFP8, 2, "--use-torch-fsdp2"),
}  # fmt: skip


@functools.cache
def traced(world_size: int, flags: str) -> list[Trace]:
    """What the ranks of a run saw."""
    argv = [*SHORT, *WIDE.split(), "--log-num-zeros-in-grad", *flags.split()]
    found = run_ranks(trace, world_size, argv, False, True, timeout_s=240)
    return [rank for process in found for rank in process]


@pytest.mark.feature("Precision: fp8 training gives one process's numbers in other layouts")
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_computes_what_one_process_computes(name: str) -> None:
    """In fp64 around the products, so that the order of sums moves nothing to another code."""
    recipe, world_size, layout = LAYOUTS[name]
    ranks = traced(world_size, f"{recipe} {layout}")
    assert compare(ranks, *traced(1, recipe), tolerances.LAYOUT[torch.float64]) == []


@pytest.mark.feature("Precision: --fp8-param-gather moves weights as bytes, with the same numbers")
def test_gathered_codes_are_what_layers_make_of_gathered_weights(tmp_path: Path) -> None:
    flags = f"{DELAYED} --bf16 --use-distributed-optimizer --overlap-grad-reduce".split()
    flags += ["--overlap-param-gather", "--ddp-bucket-size", "3000"]
    plain = losses(run_gpt(tmp_path, *flags, base=SHORT, world_size=2))
    coded = losses(run_gpt(tmp_path, *flags, "--fp8-param-gather", base=SHORT, world_size=2))
    assert coded == plain
    flags += ["--fp8-param-gather", "--use-precision-aware-optimizer"]
    assert losses(run_gpt(tmp_path, *flags, base=SHORT, world_size=2)) == plain


RECOMPUTE = {
    "full": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "parts": "--recompute-granularity selective --recompute-modules layernorm mlp core_attn",
}


def test_what_is_computed_again_has_the_same_scales(tmp_path: Path) -> None:
    plain = losses(run_gpt(tmp_path, *DELAYED.split(), base=SHORT))
    for flags in RECOMPUTE.values():
        assert losses(run_gpt(tmp_path, *DELAYED.split(), *flags.split(), base=SHORT)) == plain


EXPERTS = (
    "--num-experts 4 --moe-ffn-hidden-size 32 --disable-bias-linear --mtp-num-layers 1 "
    "--multi-latent-attention --q-lora-rank 16 --kv-lora-rank 16 --qk-head-dim 8 "
    "--qk-pos-emb-head-dim 16 --v-head-dim 8 --position-embedding-type rope "
    "--moe-shared-expert-intermediate-size 32"
)


@pytest.mark.parametrize("recipe", [DELAYED, "--fp4-format e2m1"])
def test_experts_latent_attention_and_tokens_ahead_are_quantized(
    tmp_path: Path, recipe: str
) -> None:
    plain = losses(run_gpt(tmp_path, *EXPERTS.split(), base=SHORT))
    flags = [*EXPERTS.split(), *recipe.split()]
    found = losses(run_gpt(tmp_path, *flags, base=SHORT))
    assert all(a != b for a, b in zip(found, plain, strict=True))
    torch.testing.assert_close(found, plain, rtol=5e-3, atol=0)
    if recipe == DELAYED:  # experts are elsewhere, and with them their histories
        flags += ["--expert-model-parallel-size", "2"]
        parted = losses(run_gpt(tmp_path, *flags, base=SHORT, world_size=2))
        torch.testing.assert_close(parted, found, rtol=1e-4, atol=0)


def test_a_run_may_go_over_to_fp8_and_back(tmp_path: Path) -> None:
    root = str(tmp_path / "ck")
    saving = f"--override-opt_param-scheduler --save-interval 2 --save {root} --load {root}"
    base = [*SHORT, *saving.split()]
    for count, flags in enumerate(("", DELAYED, DELAYED, ""), 1):
        steps = ["--train-iters", str(2 * count)]
        found = run_gpt(tmp_path, *steps, *flags.split(), base=base)
        assert found[-1]["iteration"] == 2 * count
        if count == 2:  # other formats have no place for histories, and none is needed
            for form in ("torch", HF):
                target = tmp_path / form
                convert(
                    ConversionRequest(source=Path(root), target=target, format=form, verify=False)
                )


def test_a_width_that_no_check_knows_is_named() -> None:
    flags = "--fp8-format hybrid --num-experts 2 --disable-bias-linear --moe-layer-freq 2"
    widths = "--moe-ffn-hidden-size 32 --ffn-hidden-size 72"
    (said,) = run_ranks(refusal, 1, [*SHORT, *flags.split(), *widths.split()])
    assert "a rank's weight of" in said
    assert "is not a multiple of 16 in both dimensions, as --fp8-format hybrid" in said


STORED = {
    "alone": (1, f"{DELAYED} --eval-interval 1 --eval-iters 1"),
    "parts of weights": (
        4,
        f"{TENSORWISE} --tensor-model-parallel-size 2 --sequence-parallel --log-params-norm "
        "--check-weight-hash-across-dp-replicas-interval 1",
    ),
    "experts": (
        2,
        f"{TENSORWISE} --num-experts 4 --expert-model-parallel-size 2 --overlap-grad-reduce "
        "--overlap-param-gather --overlap-param-gather-with-optimizer-step --ddp-num-buckets 3",
    ),
}


@pytest.mark.feature("Precision: with --fp8-param-gather weights are stored in 8 bits")
@pytest.mark.parametrize("name", selection.only(["parts of weights", "experts"], STORED))
def test_stored_codes_are_what_layers_make_of_stored_weights(tmp_path: Path, name: str) -> None:
    world_size, words = STORED[name]
    flags = [*WIDE.split(), "--bf16", "--use-distributed-optimizer", *words.split()]
    plain = losses(run_gpt(tmp_path / "p", *flags, base=SHORT, world_size=world_size))
    flags += ["--fp8-param-gather", "--save", str(tmp_path / "c"), "--save-interval", "2"]
    assert losses(run_gpt(tmp_path / "s", *flags, base=SHORT, world_size=world_size)) == plain
    flags += ["--load", str(tmp_path / "c"), "--ckpt-step", "2"]
    assert losses(run_gpt(tmp_path / "r", *flags, base=SHORT, world_size=world_size)) == plain[2:]


@pytest.mark.parametrize("flags", [f"{TENSORWISE} --bf16", f"{MXFP8} --use-torch-fsdp2"])
def test_kept_transposed_weights_change_no_bit(tmp_path: Path, flags: str) -> None:
    given = [*WIDE.split(), *flags.split()]
    usual = losses(run_gpt(tmp_path / "u", *given, base=SHORT, world_size=2))
    given.append("--keep-fp8-transpose-cache")
    assert losses(run_gpt(tmp_path / "k", *given, base=SHORT, world_size=2)) == usual

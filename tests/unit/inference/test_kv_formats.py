"""--inference-kv-cache-dtype: keys and values in bf16 or int8."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron.core.config.errors import ConfigError
from megatron.core.device import cpu_kernels
from megatron.core.inference.paged_engine.engine import cache_dtype
from megatron.core.inference.paged_engine.options import EngineOptions, KVFormat
from megatron.core.inference.sampling_params import SamplingParams
from tests.support import selection
from tests.support.ranks import run_ranks
from tests.unit.inference import test_invariance as invariance
from tests.unit.inference.test_batch_view import MLA
from tests.unit.inference.test_engine import LAYOUTS, LENGTH, assert_equal, engine, generated

FORMATS: tuple[KVFormat, ...] = ("bf16", "int8")
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt": {},
    "grouped queries": {"num_query_groups": 2},
    "window, soft cap and sinks": {
        "window_size": (5, 0), "attn_logit_softcapping": 2.0, "softmax_type": "learnable",
    },
    "latent attention": MLA,
    "cached latents": MLA | {"cache_mla_latents": True},
}  # fmt: skip


def log_probs(kv_cache: KVFormat, dtype: torch.dtype, **changes: Any) -> torch.Tensor:
    """Log-probs of a text as a prompt that is computed in chunks."""
    options = EngineOptions(page_size=4, max_step_tokens=7, kv_cache=kv_cache)
    # Rotated by torch's operations, queries and keys in bf16 are rounded twice.
    made = engine(options, 1, {}, dtype, apply_rope_fusion=True, **changes)
    text = [(7 * i + i * i) % 60 + 2 for i in range(LENGTH)]
    params = SamplingParams(num_tokens_to_generate=0, return_prompt_log_probs=True)
    made.add(made.model.request("text", text, params))
    out: list[float] = []
    while made.has_unfinished:
        out += [t.log_prob for output in made.step() for t in output.prompt_scores]
    return torch.tensor(out)


@pytest.mark.feature(
    "Generation: keys and values in bf16 or int8 (--inference-kv-cache-dtype), on a CPU"
)
@pytest.mark.parametrize(
    "dtype", selection.first(1, [torch.bfloat16, torch.float32, torch.float64])
)
@pytest.mark.parametrize("family", FAMILIES)
def test_rounded_keys_and_values_change_log_probs_little(family: str, dtype: torch.dtype) -> None:
    exact = log_probs("auto", dtype, **FAMILIES[family])
    spread = float(exact.std())
    assert len(exact) == LENGTH - 1
    for kv_cache in FORMATS:
        error = (log_probs(kv_cache, dtype, **FAMILIES[family]) - exact).abs()
        assert float(error.max()) < 0.05 * spread, kv_cache
        if dtype != torch.bfloat16 or kv_cache == "int8":
            assert float(error.max()) > 0, kv_cache


@pytest.mark.parametrize("kv_cache", FORMATS)
@pytest.mark.parametrize("name", selection.first(1, ["tp2", "pp2", "2 replicas"]))
def test_every_layout_gives_the_tokens_of_one_process(name: str, kv_cache: KVFormat) -> None:
    world, sizes, changes = LAYOUTS[name]
    options = {"max_requests": 6, "kv_cache": kv_cache}
    found = run_ranks(generated, world, sizes, changes, options)[0]
    assert_equal(found, generated(0, 1, {}, changes, options))


@pytest.mark.skipif(
    not cpu_kernels.has("paged_attention", torch.int8), reason="not in the installed extension"
)
@pytest.mark.parametrize("kv_cache", FORMATS)
def test_bits_are_those_of_a_request_alone(kv_cache: KVFormat) -> None:
    alone = invariance.made({}, max_requests=1, has_prefix_cache=False, kv_cache=kv_cache)
    wanted: dict[str, list[float]] = {}
    for request in invariance.requests():
        wanted |= invariance.bits(alone, [request], 0)
    for limits in invariance.LIMITS[::3]:
        running = invariance.made({}, **limits, kv_cache=kv_cache)
        assert invariance.bits(running, invariance.requests(), 3) == wanted, limits


def test_the_buffer_holds_more_pages() -> None:
    def num_pages(kv_cache: KVFormat) -> int:
        options = EngineOptions(
            page_size=4, buffer_bytes=2**20, kv_cache=kv_cache, max_requests=200
        )
        return engine(options, 1, {}, torch.float32, kv_channels=64).stats().num_pages

    layers = 4
    heads = 4
    width = 64
    tokens = 4
    row = 2 * layers * heads * tokens
    assert num_pages("auto") == 2**20 // (row * 4 * width)
    assert num_pages("bf16") == 2**20 // (row * 2 * width)
    assert num_pages("int8") == 2**20 // (row * (width + 4))


def test_formats_that_cannot_be_stored_are_refused() -> None:
    options = EngineOptions(kv_cache="int8")
    with pytest.raises(ConfigError, match="--inference-kv-cache-dtype int8: .* of 6 channels"):
        engine(options, 1, {}, torch.float32, kv_channels=6)
    model = replace(engine(EngineOptions(), 1, {}).model, device=torch.device("cuda"))
    with pytest.raises(ConfigError, match="--inference-kv-cache-dtype int8 runs on a CPU only"):
        cache_dtype(options, model)
    assert cache_dtype(EngineOptions(), model) is None

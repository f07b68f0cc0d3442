"""--inference-batch-invariant: bits of a request do not depend on what else the engine does."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.core.config.errors import ConfigError, MissingDependency
from megatron.core.inference.fast_linear import use_fast_linears
from megatron.core.inference.paged_engine.engine import Engine
from megatron.core.inference.paged_engine.options import EngineOptions
from megatron.core.inference.paged_engine.request import Request
from megatron.core.inference.sampling_params import SamplingParams
from megatron.core.transformer import batch_invariant
from tests.support import selection
from tests.unit.inference.test_batch_view import gpt, mamba
from tests.unit.inference.test_engine import LENGTH, engine

NUM_REQUESTS = 12
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt": {},
    "experts": {"num_moe_experts": 4, "moe_router_topk": 2},
}
LIMITS: list[dict[str, Any]] = [
    *({"max_step_tokens": n} for n in (1, 7, 16, 64)),
    {"max_requests": 3},
    {"buffer_bytes": 11 * 4 * 4 * 2 * 32 * 4, "max_requests": 6},  # 11 pages: see below
    {"has_prefix_cache": False},
]


def requests() -> list[Request]:
    out = []
    for i in range(NUM_REQUESTS):
        prompt = [(11 * (i // 3) + 5 * j) % 60 + 2 for j in range(3 + 2 * i)]  # shared beginnings
        params = SamplingParams(
            temperature=0.0 if i % 2 else 1.0,
            seed=i,
            num_tokens_to_generate=min(10, LENGTH - len(prompt)),
            ignore_eos=True,
            return_log_probs=True,
            return_prompt_log_probs=i % 4 == 0,
        )
        out.append(Request(str(i), prompt, params))
    return out


def made(changes: dict[str, Any], **options: Any) -> Engine:
    out = engine(
        EngineOptions(page_size=4, batch_invariant=True, **options),
        1,
        {},
        torch.float32,
        **changes,
    )
    use_fast_linears(out.model.module, batch_invariant=True)
    return out


def bits(running: Engine, asked: list[Request], seed: int) -> dict[str, list[float]]:
    """Token ids and log-probs of each request; requests arrive at random steps in random order."""
    rng = random.Random(seed)
    waiting = rng.sample(asked, len(asked))
    out: dict[str, list[float]] = {request.request_id: [] for request in asked}
    while waiting or running.has_unfinished:
        for _ in range(rng.choice([0, 1, 3])):
            if waiting:
                running.add(waiting.pop())
        for output in running.step():
            for token in (*output.prompt_scores, *output.new):
                out[output.request_id] += [token.token, token.log_prob]
    return out


def alone(changes: dict[str, Any]) -> dict[str, list[float]]:
    out: dict[str, list[float]] = {}
    running = made(changes, max_requests=1, has_prefix_cache=False)
    for request in requests():
        out |= bits(running, [request], 0)
    return out


@pytest.mark.feature(
    "Generation: bits that do not depend on the batch (--inference-batch-invariant)"
)
@pytest.mark.parametrize("num_orders", selection.only([1], [1, 7]))
@pytest.mark.parametrize("family", FAMILIES)
def test_bits_are_those_of_a_request_alone(family: str, num_orders: int) -> None:
    wanted = alone(FAMILIES[family])
    for number, limits in enumerate(LIMITS):
        running = made(FAMILIES[family], **limits)
        for seed in range(num_orders):
            assert bits(running, requests(), 10 * number + seed) == wanted, (limits, seed)
        if "buffer_bytes" in limits:
            assert sum(s.num_preemptions for s in running._schedulers.values()) > 0


def test_models_that_cannot_be_invariant_are_refused() -> None:
    alibi = gpt("alibi")
    with pytest.raises(ConfigError, match="attention with position biases runs torch's matmuls"):
        use_fast_linears(alibi, batch_invariant=True)
    with pytest.raises(ConfigError, match="the scan of a Mamba layer"):
        use_fast_linears(mamba(), batch_invariant=True)
    use_fast_linears(alibi)  # without the promise they are as fast as others


@pytest.mark.feature("Generation: on a GPU batch invariance is refused where sums depend on rows")
def test_on_a_gpu_models_are_refused_whose_sums_depend_on_the_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = made({}).model.module
    experts = made(FAMILIES["experts"]).model.module
    reasons: dict[str, str | None] = {"triton": None}
    monkeypatch.setattr(batch_invariant.device, "is_cuda", lambda *_: True)
    monkeypatch.setattr(batch_invariant, "why_missing", reasons.get)
    use_fast_linears(plain, batch_invariant=True)
    with pytest.raises(ConfigError, match="on a GPU: grouped GEMMs of experts sum"):
        use_fast_linears(experts, batch_invariant=True)
    plain.output_layer.tp_group = SimpleNamespace(size=lambda: 2)
    with pytest.raises(ConfigError, match="on a GPU: NCCL adds in an order.*parallel-size 1, with"):
        use_fast_linears(plain, batch_invariant=True)
    plain.output_layer.tp_group = SimpleNamespace(size=lambda: 1)
    reasons["triton"] = "triton is not installed"
    with pytest.raises(MissingDependency, match="Triton's kernels: triton is not installed"):
        use_fast_linears(plain, batch_invariant=True)

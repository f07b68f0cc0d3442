"""Fast matmuls in a model: values, bits that do not depend on the batch, updates of weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.config.errors import MissingDependency
from megatron.core.device import cpu_kernels
from megatron.core.fusions.small_linear import small_linear
from megatron.core.inference import fast_linear
from megatron.core.inference.fast_linear import FastLinear, WeightFormat, use_fast_linears
from megatron.core.inference.paged_engine.cache import BatchView, PagedCache, SlotPositions
from megatron.core.inference.paged_engine.step_plan import SAMPLE, Segment, StepPlan
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.linear import LinearCall, linear
from megatron.core.transformer.batch_invariant import sigmoid, softplus
from tests.support import selection, tolerances
from tests.support.one_process import one_process_groups, tiny_config
from tests.unit.inference.test_batch_view import MLA, ints, plans, token

LENGTH = 40
VOCABULARY = 50
PAGE = 4
EXPERTS = {
    "num_moe_experts": 5, "moe_router_topk": 2, "moe_router_score_function": "sigmoid",
    "moe_shared_expert_intermediate_size": 20, "moe_shared_expert_gate": True,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {},
    "llama": {
        "num_query_groups": 2, "gated_linear_unit": True, "activation_func": F.silu,
        "normalization": "RMSNorm", "add_bias_linear": False, "attn_logit_softcapping": 3.0,
    },
    "experts": EXPERTS,
    "latent attention": MLA,
    "latent attention, RMS norm": MLA | {"normalization": "RMSNorm"},
    "cached latents": MLA | {"cache_mla_latents": True},
}  # fmt: skip
compiled_only = pytest.mark.skipif(
    not cpu_kernels.has("paged_attention", torch.float32), reason="not in the installed extension"
)


def model(dtype: torch.dtype = torch.float32, *, tied: bool = True, **changes: Any) -> GPTModel:
    torch.manual_seed(5)
    config = tiny_config(params_dtype=dtype, init_method_std=0.3, **changes)
    return GPTModel(
        config,
        get_gpt_layer_local_spec(config.num_moe_experts, config=config),
        VOCABULARY,
        LENGTH,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=tied,
        pg_collection=one_process_groups(),
    ).eval()


def logits(module: nn.Module, cache: PagedCache, plan: StepPlan) -> Tensor:
    """Run one step: [outputs, v]."""
    view = BatchView(cache, plan, torch.device("cpu"), slots=SlotPositions(9))
    ids = view.token_ids[None]
    positions = view.positions(ids.shape[1])[0][None]
    with torch.no_grad():
        out: Tensor = module(ids, positions, None, inference_context=view)
    return out[0]


def row_by_row(module: nn.Module, request: int, length: int) -> Tensor:
    """Logits of a request that is alone and advances by one token a step: [s, v]."""
    cache = PagedCache(16, PAGE, 8)
    pages = np.arange(16)
    rows = []
    for at in range(length):
        held = pages[: at // PAGE + 1]
        tokens = ints(token(request, at))
        segment = Segment(0, at, tokens, held, np.full(1, SAMPLE))
        rows.append(logits(module, cache, StepPlan([segment])))
    return torch.cat(rows)


@compiled_only
@pytest.mark.feature("Generation: logits do not depend on the batch by a bit (a CPU)")
@pytest.mark.parametrize("dtype", selection.first(1, [torch.bfloat16, torch.float32]))
@pytest.mark.parametrize("name", MODELS)
def test_bits_of_logits_do_not_depend_on_the_batch(name: str, dtype: torch.dtype) -> None:
    weights: WeightFormat
    for weights in ("fp32", "int8"):
        module = model(dtype, **MODELS[name])
        use_fast_linears(module, weights, batch_invariant=True)
        lengths = [1, 9, 26]
        alone = [row_by_row(module, i, n) for i, n in enumerate(lengths)]
        for seed in range(2):
            cache = PagedCache(64, PAGE, 8)
            for plan, rows in plans(lengths, seed):
                found = logits(module, cache, plan)
                for row, (request, at) in zip(found, rows, strict=True):
                    assert torch.equal(row, alone[request][at]), (weights, seed, request, at)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_plain_model(name: str, tied: bool) -> None:
    plan = next(plan for plan, rows in plans([9, 23, 40], 1) if rows)
    wanted = logits(model(tied=tied, **MODELS[name]), PagedCache(64, PAGE, 8), plan)
    error: dict[WeightFormat, float] = {}
    weights: WeightFormat
    for weights in ("fp32", "bf16", "int8"):
        module = model(tied=tied, **MODELS[name])
        use_fast_linears(module, weights)
        found = logits(module, PagedCache(64, PAGE, 8), plan)
        error[weights] = float((found - wanted).norm() / wanted.norm())
    assert error["fp32"] < 1e-5
    # The copies are used, and rounding to 8 bits of mantissa or codes costs no more.
    for rounded in (error["bf16"], error["int8"]):
        assert 1e-4 < rounded < 0.1


@contextmanager
def counted() -> Iterator[mock.Mock]:
    with mock.patch.object(
        fast_linear, "quantize_weight", wraps=fast_linear.quantize_weight
    ) as count:
        yield count


@pytest.mark.parametrize("tied", [True, False])
def test_weights_are_rounded_once_and_again_after_an_update(tied: bool) -> None:
    plan = next(plan for plan, rows in plans([9, 23, 40], 1) if rows)
    module = model(tied=tied)
    use_fast_linears(module, "int8")
    with counted() as count:
        before = logits(module, PagedCache(64, PAGE, 8), plan)
        num_linears = count.call_count
        again = logits(module, PagedCache(64, PAGE, 8), plan)
        assert num_linears == 2 * 4 + 1
        assert count.call_count == num_linears
        assert torch.equal(before, again)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(0.5)
        after = logits(module, PagedCache(64, PAGE, 8), plan)
        assert count.call_count == 2 * num_linears
    fresh = model(tied=tied)
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.mul_(0.5)
    use_fast_linears(fresh, "int8")
    assert torch.equal(after, logits(fresh, PagedCache(64, PAGE, 8), plan))


def test_batch_invariance_needs_the_compiled_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_kernels, "has", lambda *_: False)
    with pytest.raises(MissingDependency, match="compiled kernels"):
        use_fast_linears(model(), batch_invariant=True)
    use_fast_linears(model())


def test_the_sigmoid_and_the_softplus_are_those_of_torch() -> None:
    x = torch.tensor([-200.0, -90.0, -1.0, 0.0, 1e-3, 3.0, 90.0, torch.inf, -torch.inf, torch.nan])
    for ours, of_torch in ((sigmoid, torch.sigmoid), (softplus, F.softplus)):
        wanted = of_torch(x.double()).float()
        torch.testing.assert_close(ours(x), wanted, equal_nan=True, **tolerances.of(torch.float32))


@torch.no_grad()
@pytest.mark.parametrize("rows", [55, 56, 200])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_many_rows_are_multiplied_in_float32(rows: int, batch_invariant: bool) -> None:
    x = torch.randn(rows, 1, 300) / 300
    weight, bias = torch.randn(70, 300), torch.randn(70)
    found = linear(x, LinearCall(weight, bias), FastLinear("fp32", batch_invariant))
    wanted = F.linear(x.double(), weight.double(), bias.double()).float()
    torch.testing.assert_close(found, wanted, **tolerances.of(torch.float32))
    if batch_invariant:
        assert torch.equal(found[:1], small_linear(x[:1], weight, bias))

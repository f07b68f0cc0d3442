"""The real Transformer Engine against our own layers; for a machine with both, never run so far."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatron.core import device
from megatron.core.extensions import transformer_engine as te
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.params.param_info import info_of, name_parameters
from megatron.core.params.param_init import initialize_parameters
from tests.support import tolerances
from tests.support.one_process import one_process_groups, tiny_config

S, B, VOCABULARY = 64, 2, 64


@pytest.fixture(autouse=True)
def on_a_gpu() -> Iterator[None]:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    device.choose("cuda")
    try:
        if (reason := te.unsupported_reason()) is not None:
            pytest.skip(reason)
        yield
    finally:
        device.choose("cpu")


def loss_and_gradients(by_engine: bool, **changes: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    config = tiny_config(
        hidden_size=128,
        ffn_hidden_size=256,
        params_dtype=torch.bfloat16,
        moe_ffn_hidden_size=128,
        **changes,
    )
    spec: Any = get_gpt_layer_local_spec(config=config)
    if by_engine or config.num_moe_experts:
        spec = get_gpt_decoder_block_spec(config, by_engine)
    model = GPTModel(config, spec, VOCABULARY, S, pg_collection=one_process_groups())
    name_parameters(model)
    initialize_parameters(model, seed=1)
    tokens = torch.arange(B * S, device=device.current()).view(B, S) * 7 % VOCABULARY
    positions = torch.arange(S, device=device.current()).expand(B, S)
    loss = model(tokens, positions, None, labels=tokens.roll(-1, 1)).float().mean()
    loss.backward()
    return loss.detach(), {info_of(p).name: p.grad for p in model.parameters()}


MODELS: dict[str, dict[str, Any]] = {
    "dense": {"normalization": "RMSNorm", "qk_layernorm": True},
    "grouped queries": {"num_query_groups": 2, "layernorm_zero_centered_gamma": True},
    "window": {"window_size": (8, 0)},
    "sink": {"softmax_type": "off-by-one"},
    "experts": {"num_moe_experts": 4, "moe_grouped_gemm": True, "add_bias_linear": False},
}


@pytest.mark.gpu
@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS)
def test_losses_and_gradients_are_those_of_our_layers(changes):
    loss, found = loss_and_gradients(True, **changes)
    expected, gradients = loss_and_gradients(False, **changes)
    torch.testing.assert_close(loss, expected, **tolerances.of(torch.bfloat16))
    for name, want in gradients.items():
        torch.testing.assert_close(found[name], want, **tolerances.of(torch.bfloat16))


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise", "mxfp8"])
def test_a_recipe_of_8_bits_is_near_to_bf16(recipe):
    # Within three bits of mantissa; hardware that lacks the recipe says so.
    try:
        loss, found = loss_and_gradients(True, fp8="hybrid", fp8_recipe=recipe)
    except AssertionError as lack:
        pytest.skip(str(lack))
    expected, gradients = loss_and_gradients(False)
    assert abs(loss - expected) <= expected / 100
    for name, want in gradients.items():
        assert (found[name] - want).norm() <= want.norm() / 4, name

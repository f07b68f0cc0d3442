"""Adapters on one rank: targets, initial values, the frozen model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megatron.core.config.errors import ConfigError
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.params.param_info import info_of
from megatron.core.params.param_init import Init, initialize_parameters
from megatron.core.peft import lora
from megatron.core.peft.lora import (
    LinearAdapter,
    LoraConfig,
    attach_adapters,
    begin_magnitudes,
    check_targets,
    names_in,
    split_name,
)
from megatron.core.tensor_parallel.layers import Linear
from tests.support import tolerances
from tests.support.one_process import one_process_groups, tiny_config
from tests.unit.models.test_gpt_model import build, tokens

_TARGETS = ("linear_qkv", "o_proj", "mlp.gate_proj", "down_proj", "embed_tokens", "lm_head")


def adapted(*targets: str, **changes: float) -> nn.Module:
    """Return a model whose adapters are not zero."""
    model = build(model={"share_embeddings_and_output_weights": False})
    config = LoraConfig(targets=targets or _TARGETS, **({"rank": 4, "alpha": 8.0} | changes))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lora, "START", Init("normal", 0.05))
        attach_adapters(model, config)
        initialize_parameters(model, 7)
    begin_magnitudes([model])
    return model


def logits(model: nn.Module) -> torch.Tensor:
    ids, positions = tokens()
    return model(ids, positions, None)


def trained(model: nn.Module) -> list[str]:
    return [info_of(p).name for p in model.parameters() if p.requires_grad]


def test_only_adapters_are_trained() -> None:
    names = trained(adapted("q_proj", "v_proj", "linear_fc2"))
    layer = "decoder.layers.0."
    assert [name.removeprefix(layer) for name in names if name.startswith(layer)] == [
        *(f"self_attention.linear_qkv.lora.{own}" for own in ("q_a", "q_b", "v_a", "v_b")),
        *(f"mlp.linear_fc2.lora.{own}" for own in "ab"),
    ]
    assert len(names) == 12
    assert split_name(names[1]) == ("decoder.layers.0.self_attention.linear_qkv", "b", "q")


def test_an_adapter_adds_to_the_weight() -> None:
    """Outputs are those of the model whose weights contain the adapters."""
    model = adapted()
    expected = logits(model.double())
    merged = build(model={"share_embeddings_and_output_weights": False})
    initialize_parameters(merged.double(), 7)
    for one, other in zip(
        (m for m in model.modules() if hasattr(m, "lora")),
        (m for m in merged.modules() if hasattr(m, "lora")),
        strict=True,
    ):
        with torch.no_grad():
            other.weight.copy_(one.weight)
            other.weight += 0 if one.lora is None else one.lora.delta()
        if isinstance(one, Linear):
            assert torch.equal(one.effective_weight(), other.weight)
    torch.testing.assert_close(logits(merged), expected, **tolerances.of(torch.float64))


def test_adapters_begin_as_those_of_peft() -> None:
    model = build(model={"share_embeddings_and_output_weights": False})
    before = logits(model)
    attach_adapters(model, LoraConfig(rank=4, alpha=8.0, targets=_TARGETS))
    initialize_parameters(model, 5)
    torch.testing.assert_close(logits(model), before, **tolerances.LOGITS)
    adapter = model.decoder.layers[0].mlp.linear_fc2.lora
    bound = model.decoder.layers[0].mlp.linear_fc2.weight.shape[1] ** -0.5
    assert 0.8 * bound < adapter.a.abs().max() <= bound
    assert not adapter.b.any()
    assert not model.embedding.word_embeddings.lora.a.any()
    assert model.embedding.word_embeddings.lora.b.std() > 0.8


@pytest.mark.parametrize("use_dora", [False, True])
def test_a_frozen_model_keeps_its_weights(use_dora: bool) -> None:
    model = adapted(*_TARGETS[:4], "lm_head", use_dora=use_dora)
    before = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    logits(model).square().mean().backward()
    optimizer.step()
    after = dict(model.named_parameters())
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert all(after[name].grad is None for name in before)
    assert all(p.grad.any() for p in model.parameters() if p.requires_grad)


def test_dropout_of_an_adapter_leaves_the_frozen_model_alone() -> None:
    model = adapted(dropout=0.5)
    assert not torch.equal(logits(model), logits(model))
    model.eval()
    assert torch.equal(logits(model), logits(model))


def test_dora_begins_as_the_frozen_model() -> None:
    model = build(model={"share_embeddings_and_output_weights": False})
    before = logits(model)
    targets = ("q_proj", "v_proj", "linear_fc2", "lm_head")
    attach_adapters(model, LoraConfig(rank=4, alpha=8.0, targets=targets, use_dora=True))
    initialize_parameters(model, 5)
    assert not torch.allclose(logits(model), before)
    assert begin_magnitudes([model])
    torch.testing.assert_close(logits(model), before, **tolerances.LOGITS)
    layer = model.decoder.layers[0].mlp.linear_fc2
    torch.testing.assert_close(layer.lora.m.detach(), layer.weight.norm(dim=1))
    with torch.no_grad():
        layer.lora.m.mul_(2)
    assert not begin_magnitudes([model])  # trained values stay
    torch.testing.assert_close(layer.effective_weight(), 2 * layer.weight)


def test_dropout_acts_on_both_products_of_dora(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in PEFT: the output is W x + (m / |W'| - 1) W d(x) + m / |W'| B A d(x)."""
    layer = adapted("linear_fc2", use_dora=True).decoder.layers[0].mlp.linear_fc2
    x = torch.randn(3, layer.weight.shape[1], generator=torch.Generator().manual_seed(3))
    monkeypatch.setattr(LinearAdapter, "_with_dropout", lambda self, x: x * 0.5)
    term = layer.lora(x, x @ layer.weight.t())
    monkeypatch.undo()
    expected = layer.lora.eval()(x / 2, x / 2 @ layer.weight.t())
    assert expected.abs().max() > 0.01
    torch.testing.assert_close(term, expected)


def test_dora_of_an_embedding_is_refused() -> None:
    with pytest.raises(ConfigError, match="--lora-use-dora: embeddings take no DoRA"):
        adapted("embed_tokens", use_dora=True)


@pytest.mark.feature("LoRA: an unknown target module is one error message with the names there are")
def test_an_unknown_target_is_named_with_those_there_are() -> None:
    config = LoraConfig(rank=4, alpha=8.0, targets=("q_proj", "c_attn"))
    found = names_in(build(), config.targets)
    message = "--lora-target-modules c_attn: .* it has .*down_proj.*linear_qkv.*q_proj"
    with pytest.raises(ConfigError, match=message):
        check_targets(config.targets, [found])


def test_rank_stabilised_scale() -> None:
    assert LoraConfig(rank=16, alpha=8.0, targets=(), use_rslora=True).scale == 2.0
    assert LoraConfig(rank=16, alpha=8.0, targets=()).scale == 0.5


def test_experts_have_adapters_of_their_own() -> None:
    experts = {"num_moe_experts": 2, "moe_router_topk": 2, "moe_ffn_hidden_size": 16}
    config = tiny_config(gated_linear_unit=True, add_bias_linear=False, **experts)
    spec = get_gpt_decoder_block_spec(config)
    model = GPTModel(config, spec, 16, 8, pg_collection=one_process_groups())
    attach_adapters(model, LoraConfig(rank=2, alpha=2.0, targets=("up_proj", "w2")))
    names = {name.split("layers.1.mlp.")[-1] for name in trained(model) if "layers.1." in name}
    each = (
        "linear_fc1.lora.up_a",
        "linear_fc1.lora.up_b",
        "linear_fc2.lora.a",
        "linear_fc2.lora.b",
    )
    dora = LoraConfig(rank=2, alpha=2.0, targets=("up_proj",), use_dora=True)
    with pytest.raises(ConfigError, match="--lora-use-dora: experts take no DoRA"):
        attach_adapters(GPTModel(config, spec, 16, 8, pg_collection=one_process_groups()), dora)
    assert names == {f"experts.local_experts.{n}.{own}" for n in range(2) for own in each}

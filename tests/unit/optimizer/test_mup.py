"""muP: the formulas of Tensor Programs V, Microsoft's mup, and a coordinate check."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from tests.support.one_process import tiny_config

LENGTH, VOCABULARY, BASE = 8, 32, 32


def build(
    groups: ProcessGroupCollection, hidden: int, *, tied: bool = True, **config: Any
) -> GPTModel:
    mup = {"use_mup": True, "mup_base_hidden_size": BASE, "mup_base_head_dim": BASE / 4}
    made = tiny_config(hidden_size=hidden, init_method_std=0.1, **(mup | config))
    torch.manual_seed(3)
    return GPTModel(
        made,
        get_gpt_layer_local_spec(config=made),
        VOCABULARY,
        LENGTH,
        share_embeddings_and_output_weights=tied,
        pg_collection=groups,
    )


def optimizer_of(
    model: GPTModel, groups: ProcessGroupCollection, **config: Any
) -> MegatronOptimizer:
    values = {"lr": 0.01, "weight_decay": 0.1, "clip_grad": 0.0, **config}
    return get_megatron_optimizer(OptimizerConfig(**values), [model], pg_collection=groups)


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_rates_and_decays_are_those_of_microsofts_mup(
    alone: ProcessGroupCollection, optimizer: str
):
    mup = pytest.importorskip("mup")
    rules = {"adam": mup.MuAdam, "sgd": mup.MuSGD}
    base, delta, wide = (build(alone, n * BASE, tied=False) for n in (1, 2, 4))
    mup.set_base_shapes(wide, base, delta=delta, rescale_params=False, do_assert=False)
    theirs = rules[optimizer](wide.parameters(), lr=0.01, weight_decay=0.1)
    expected = {
        p: (g["lr"], pytest.approx(g["weight_decay"] * (p.dim() > 1)))
        for g in theirs.param_groups
        for p in g["params"]
    }
    ours = optimizer_of(wide, alone, optimizer=optimizer)
    found = {p: (g["lr"], g["weight_decay"]) for g in ours.param_groups for p in g["params"]}
    assert len({lr for lr, _ in found.values()}) == 2
    for name, param in wide.named_parameters():
        assert found[param] == expected[param], name


def test_initial_weights_and_multipliers_follow_table_8(alone: ProcessGroupCollection):
    model = build(alone, 8 * BASE, tied=False, mup_output_mult=3.0, mup_embedding_mult=2.0)
    layer = model.decoder.layers[1]
    expected = {
        model.embedding.word_embeddings.weight: 0.1,
        model.output_layer.weight: 0.1,
        layer.self_attention.linear_qkv.weight: 0.1 / 8**0.5,
        layer.mlp.linear_fc2.weight: 0.1 / 8**0.5 / 4**0.5,  # 2 sublayers in each of 2 layers
    }
    for weight, std in expected.items():
        assert weight.std().item() == pytest.approx(std, rel=0.05)
    # 1/sqrt(d) at the width of the base model's heads, 1/d beyond.
    assert layer.self_attention.core_attention.softmax_scale == pytest.approx(8**0.5 / 64)
    assert model.embedding.scale == 2.0
    hidden = torch.ones(1, 1, 8 * BASE)
    assert torch.equal(model.scaled(hidden), hidden * 3 / 8)


def movement(groups: ProcessGroupCollection, hidden: int, **config: Any) -> dict[str, float]:
    """Return the mean size of the change of logits and hidden states by four steps."""
    model = build(groups, hidden, **config)
    optimizer = optimizer_of(model, groups, lr=0.02)
    ids = torch.randint(VOCABULARY, (8, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    places = torch.arange(LENGTH).expand(8, LENGTH)
    seen: list[Tensor] = []
    model.decoder.layers[-1].mlp.register_forward_hook(lambda *a: seen.append(a[2][0].detach()))
    every = []
    for _ in range(5):
        logits = model(ids[:, :-1], places, None)
        every.append(logits.detach())
        F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    change = {"logits": every[-1] - every[0], "hidden": seen[-1] - seen[0]}
    return {name: values.abs().mean().item() for name, values in change.items()}


@pytest.mark.feature("Optimizer: muP keeps the best learning rate over widths")
def test_activations_move_alike_at_all_widths(alone: ProcessGroupCollection):
    narrow, wide = (movement(alone, width) for width in (64, 512))
    plain = {"use_mup": False}
    narrow_plain, wide_plain = (movement(alone, width, **plain) for width in (64, 512))
    for name in narrow:
        assert 0.6 < wide[name] / narrow[name] < 1.7, name
        assert wide_plain[name] / narrow_plain[name] > 2.5, name

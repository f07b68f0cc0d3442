"""Layers whose parts are missing, replaced by a matrix, or of another width."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron.core.config.errors import ConfigError
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.gpt.heterogeneous.heterogeneous_layer_specs import (
    get_gpt_heterogeneous_layer_spec,
)
from megatron.core.parallel.process_groups_config import create_process_groups, make_grids
from megatron.core.transformer.heterogeneous.heterogeneous_config import layer_shapes, width_of
from tests.support import tolerances
from tests.support.one_process import one_process_groups, tiny_config
from tests.support.ranks import run_ranks
from tests.support.sharded import assemble_gradients, gradients

ABSENT, MATRIX = {"no_op": True}, {"replace_with_linear": True}
BLOCKS: list[dict[str, Any]] = [
    {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 6.0}},
    {"attention": ABSENT, "ffn": {"ffn_mult": 13.0}},
    {"attention": MATRIX, "ffn": ABSENT},
    {"attention": {"n_heads_in_group": 2, "no_op": False}, "ffn": MATRIX},
]
DESCRIBED: dict[str, Any] = {
    "hidden_act": "silu",
    "hidden_size": 32,
    "num_attention_heads": 4,
    "block_configs": BLOCKS,
}


def config_of(described: Any = None, **changes: Any) -> Any:
    values: dict[str, Any] = {
        "num_layers": 4,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "num_query_groups": 2,
        "params_dtype": torch.float64,
        "heterogeneous_layers_config_encoded_json": json.dumps(described or DESCRIBED),
    }
    return tiny_config(**values | changes)


def build(config: Any, groups: Any) -> GPTModel:
    torch.manual_seed(1)
    spec = get_gpt_heterogeneous_layer_spec(config)
    args = (config, spec, 64, 16)
    return GPTModel(*args, position_embedding_type="rope", pg_collection=groups)


@pytest.mark.feature("Model: layers of differing shape (Llama-Nemotron)")
def test_each_layer_has_the_shape_it_is_given() -> None:
    model = build(config_of(), one_process_groups())
    shapes = [
        {name: tuple(p.shape) for name, p in layer.named_parameters() if p.dim() == 2}
        for layer in model.decoder.layers
    ]
    attention = {
        "self_attention.linear_qkv.weight": (64, 32),
        "self_attention.linear_proj.weight": (32, 32),
    }
    assert shapes == [
        {**attention, "mlp.linear_fc1.weight": (512, 32), "mlp.linear_fc2.weight": (32, 256)},
        {"mlp.linear_fc1.weight": (1024, 32), "mlp.linear_fc2.weight": (32, 512)},
        {"self_attention.weight": (32, 32)},
        {**attention, "mlp.weight": (32, 32)},
    ]


def test_an_absent_part_adds_nothing_and_a_matrix_adds_its_product() -> None:
    layer = build(config_of(), one_process_groups()).decoder.layers[2]
    x = torch.randn(5, 2, 32, dtype=torch.float64)
    out, _ = layer(x)
    expected = x + F.linear(layer.input_layernorm(x), layer.self_attention.weight)
    torch.testing.assert_close(out, expected, **tolerances.of(torch.float64))


def loss_and_gradients(model: GPTModel) -> Any:
    ids = torch.arange(32).view(2, 16)
    loss = model(ids, torch.arange(16).expand(2, 16), None, labels=ids + 1).mean()
    loss.backward()
    return loss.detach(), gradients(model)


def one_of_two(rank: int, world_size: int, sequence_parallel: bool) -> Any:
    groups = create_process_groups(*make_grids(dist.get_world_size(), tp=2))
    return loss_and_gradients(build(config_of(sequence_parallel=sequence_parallel), groups))


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_two_ranks_give_the_loss_and_gradients_of_one(sequence_parallel: bool) -> None:
    loss, grads = loss_and_gradients(build(config_of(), one_process_groups()))
    ranks = run_ranks(one_of_two, 2, sequence_parallel)
    limits = tolerances.of(torch.float64)
    torch.testing.assert_close(ranks[0][0], loss, **limits)
    torch.testing.assert_close(
        assemble_gradients([r[1] for r in ranks]), assemble_gradients([grads]), **limits
    )


def test_without_a_description_all_layers_are_alike(tmp_path: Path) -> None:
    assert layer_shapes(tiny_config()) is None
    spec = get_gpt_heterogeneous_layer_spec(tiny_config())
    assert spec.layer_specs == [spec.layer_specs[0]] * 2
    path = tmp_path / "config.json"
    path.write_text(json.dumps(DESCRIBED))
    from_file = config_of(
        heterogeneous_layers_config_encoded_json="", heterogeneous_layers_config_path=str(path)
    )
    assert layer_shapes(from_file) == layer_shapes(config_of())


def test_multipliers_round_up_to_256() -> None:
    assert width_of(2.625, 8192) == 14336
    assert width_of(5.25, 8192) == 28672
    assert width_of(0.5, 32) == 256


@pytest.mark.parametrize(
    ("described", "sentence"),
    [
        ({**DESCRIBED, "hidden_size": 64}, "describes 64 where --hidden-size is 32"),
        ({**DESCRIBED, "num_attention_heads": 8}, "describes 8 where --num-attention-heads is 4"),
        ({**DESCRIBED, "hidden_act": "gelu"}, "describes gelu where the activation is silu"),
        ({**DESCRIBED, "block_configs": BLOCKS[:3]}, "describes 3 where --num-layers is 4"),
        ({"hidden_size": 32}, "has no list block_configs"),
        (
            {**DESCRIBED, "block_configs": [{"attention": {}, "ffn": {}}] * 4},
            "an ffn block without ffn_mult",
        ),
        (
            {
                **DESCRIBED,
                "block_configs": [
                    {"attention": {"n_heads_in_group": n}, "ffn": ABSENT} for n in (1, 2, 2, 2)
                ],
            },
            r"n_heads_in_group must be one number for all layers, not \[1, 2\]",
        ),
        (
            {
                **DESCRIBED,
                "block_configs": [{"attention": {"n_heads_in_group": 4}, "ffn": ABSENT}] * 4,
            },
            "describes 1 where --num-query-groups is 2",
        ),
    ],
)
def test_a_contradiction_is_named(described: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        layer_shapes(config_of(described))


def test_an_unreadable_file_is_named() -> None:
    missing = tiny_config(heterogeneous_layers_config_path="/nowhere/config.json")
    with pytest.raises(
        ConfigError, match="--heterogeneous-layers-config-path /nowhere/config.json"
    ):
        layer_shapes(missing)

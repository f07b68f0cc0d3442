"""Descriptions of GPT layers under the reference's signatures."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
from torch import nn

from megatron.core.config.errors import ConfigError
from megatron.core.extensions.transformer_engine import TENorm
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
    get_gpt_mtp_block_spec,
    get_imported_layer_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.norms import HeadsWideRMSNorm, Norm
from megatron.core.transformer.spec_utils import build_module
from megatron.core.utils import PaddedSize
from tests.support.one_process import one_process_groups, one_rank, tiny_config

PATH = "a_users_module"


def test_arguments_stand_where_scripts_put_them():
    arguments = None, False, True, False, None, False
    for spec, norm in (
        (get_gpt_layer_local_spec(*arguments, "RMSNorm"), Norm),
        (get_gpt_layer_with_transformer_engine_spec(*arguments, False), TENorm),
        (get_gpt_layer_local_spec(config=tiny_config(qk_layernorm=True)), Norm),
    ):
        assert spec.submodules.self_attention.submodules.q_layernorm is norm
    assert get_gpt_layer_local_spec().submodules.self_attention.submodules.q_layernorm is None


def test_the_config_says_what_scripts_cannot():
    wide = get_gpt_layer_local_spec(config=tiny_config(qk_layernorm_full_width=True))
    assert wide.submodules.self_attention.submodules.q_layernorm is HeadsWideRMSNorm


def test_every_layer_of_a_block_has_a_spec():
    block = get_gpt_decoder_block_spec(tiny_config(), use_transformer_engine=True, vp_stage=None)
    assert len(block.layer_specs) == 2


@pytest.mark.parametrize(
    ("wish", "sentence"),
    [
        ({"use_kitchen": True}, "use_kitchen: the kitchen package is not public"),
    ],
)
def test_what_is_not_here_is_refused(wish, sentence):
    with pytest.raises(ConfigError, match=sentence):
        get_gpt_layer_local_spec(**wish)


def test_what_predicts_further_ahead_is_like_the_last_layer():
    spec = get_gpt_layer_local_spec()
    assert get_gpt_mtp_block_spec(tiny_config(), spec, use_transformer_engine=False) is None
    config = tiny_config(num_moe_experts=2, moe_layer_freq=(0, 1), mtp_num_layers=1)
    block = get_gpt_decoder_block_spec(config)
    (layer,) = get_gpt_mtp_block_spec(config, block).layer_specs
    assert layer.submodules.transformer_layer is block.layer_specs[1]


@pytest.mark.parametrize(("size", "true_size"), [(PaddedSize(16, 11), 11), (16, None)])
def test_a_model_learns_the_true_vocabulary_from_the_padded_size(size, true_size):
    spec = get_gpt_layer_local_spec()
    model = GPTModel(tiny_config(), spec, size, 8, pg_collection=one_process_groups())
    assert model.num_tokens == true_size
    assert model.output_layer.weight.shape[0] == 16


def test_an_imported_spec_may_come_from_a_function(monkeypatch):
    plain = get_gpt_layer_local_spec()
    given = []
    users = SimpleNamespace(
        plain=plain,
        without=lambda: plain,
        optional=lambda wide=False: plain,
        positional=lambda c: given.append(c) or plain,
        by_name=lambda *, config=None: given.append(config) or plain,
        wrong=lambda: MLP,
    )
    monkeypatch.setitem(sys.modules, PATH, users)
    config = tiny_config()
    for name in ("plain", "without", "optional", "positional", "by_name"):
        assert get_imported_layer_spec((PATH, name), config) is plain
    assert given == [config, config]
    with pytest.raises(ConfigError, match="--spec a_users_module wrong is a type: name a ModuleSp"):
        get_imported_layer_spec((PATH, "wrong"), config)
    with pytest.raises(ConfigError, match="--spec a_users_module nothing cannot be imported"):
        get_imported_layer_spec((PATH, "nothing"), config)
    with pytest.raises(ConfigError, match="--spec takes a module and a name"):
        get_imported_layer_spec((PATH,), config)


class HandsOn(MLP):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)


def test_a_class_that_hands_its_arguments_on_gets_what_its_base_names():
    submodules = get_gpt_layer_local_spec().submodules.mlp.submodules
    offered = {"tp_group": one_rank(), "pg_collection": one_process_groups()}
    mlp = build_module(HandsOn, config=tiny_config(), submodules=submodules, offered=offered)
    assert mlp.linear_fc1.weight.shape == (128, 32)


@pytest.mark.parametrize(
    "wish",
    [
        {"layer_norm_placement": "post"},
        {"layer_norm_placement": "sandwich"},
        {"qk_layernorm_full_width": True},
    ],
)
def test_a_spec_that_knows_less_than_the_config_is_refused(wish):
    config, groups = tiny_config(**wish), one_process_groups()
    (flag,) = wish
    with pytest.raises(ConfigError, match=f"--{flag.replace('_', '-')}.*: the spec of the layer"):
        GPTModel(config, get_gpt_layer_local_spec(), 16, 8, pg_collection=groups)
    GPTModel(config, get_gpt_layer_local_spec(config=config), 16, 8, pg_collection=groups)


class PlainCore(nn.Module):
    def __init__(self, config, layer_number, attn_mask_type):
        super().__init__()


def test_a_core_that_knows_no_sink_is_refused():
    spec, groups = get_gpt_layer_local_spec(), one_process_groups()
    spec.submodules.self_attention.submodules.core_attention = PlainCore
    GPTModel(tiny_config(), spec, 16, 8, pg_collection=groups)
    with pytest.raises(
        ConfigError, match="--softmax-type: .* PlainCore has no attention sink; use DotPro"
    ):
        GPTModel(tiny_config(softmax_type="learnable"), spec, 16, 8, pg_collection=groups)

"""Layers as projects build them: without process groups, and with Transformer Engine's names."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.fusions.rope import RotaryTable
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parallel import parallel_state
from megatron.core.params.param_info import name_parameters
from megatron.core.params.param_init import initialize_parameters
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from megatron.core.tensor_parallel.random import model_parallel_seed
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.multi_token_prediction import roll_tensor
from megatron.core.transformer.rope import RotaryEmbedding
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_layer import TransformerLayer
from tests.support import tolerances
from tests.support.one_process import one_process_groups, tiny_config
from tests.support.ranks import run_ranks
from tests.support.sharded import assemble_gradients, gradients

LENGTH, BATCH, WIDTH = 8, 2, 32
COMMON: dict[str, Any] = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": F.silu,
    "add_bias_linear": False,
    "params_dtype": torch.float64,
    "qk_layernorm": True,
}
LATENT: dict[str, Any] = {
    "multi_latent_attention": True,
    **{"q_lora_rank": 8, "kv_lora_rank": 8, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4},
    "v_head_dim": 8,
}
CASES: dict[str, dict[str, Any]] = {
    "grouped": {"num_query_groups": 2},
    "biases": {"normalization": "LayerNorm", "add_bias_linear": True},
    "latent": LATENT,
}
ATTENTION = "self_attention."
# Names by which converters know a layer's parameters.
OF_MLP = {"mlp.linear_fc1.layer_norm_weight", "mlp.linear_fc1.weight", "mlp.linear_fc2.weight"}
NAMES = {
    "grouped": OF_MLP
    | {f"{ATTENTION}{name}.weight" for name in ("linear_qkv", "linear_proj")}
    | {f"{ATTENTION}{name}.weight" for name in ("q_layernorm", "k_layernorm")}
    | {f"{ATTENTION}linear_qkv.layer_norm_weight"},
    "latent": OF_MLP
    | {"input_layernorm.weight", f"{ATTENTION}linear_proj.weight"}
    | {f"{ATTENTION}linear_{name}_{kind}_proj.weight" for name in ("q", "kv")
       for kind in ("down", "up")}
    | {f"{ATTENTION}linear_{name}_up_proj.layer_norm_weight" for name in ("q", "kv")},
}  # fmt: skip


def run_layer(
    case: str, by_engine: bool, *, sequence_parallel: bool = False
) -> tuple[Tensor, Any, set[str]]:
    """Output and gradients of a layer on this rank, and the local names of its parameters."""
    tp = parallel_state.get_tensor_model_parallel_world_size() if sequence_parallel else 1
    config = tiny_config(
        **COMMON | CASES[case],
        tensor_model_parallel_size=tp,
        sequence_parallel=sequence_parallel,
    )
    make = get_gpt_layer_with_transformer_engine_spec if by_engine else get_gpt_layer_local_spec
    spec = make(None, False, True, config.multi_latent_attention)
    layer = TransformerLayer(config, spec.submodules, 1)
    name_parameters(layer)
    initialize_parameters(layer, seed=5)
    generator = torch.Generator().manual_seed(3)
    hidden, weights = torch.randn(2, LENGTH, BATCH, WIDTH, generator=generator, dtype=torch.float64)
    rank = parallel_state.get_tensor_model_parallel_rank() if tp > 1 else 0
    hidden, weights = (x.chunk(tp)[rank] for x in (hidden, weights))
    angles = None if "latent" in case else RotaryEmbedding(config.kv_channels)(LENGTH)
    output, context = layer(hidden_states=hidden, attention_mask=None, rotary_pos_emb=angles)
    assert context is None
    (output * weights).sum().backward()
    return output.detach(), gradients(layer), {name for name, _ in layer.named_parameters()}


@functools.cache
def alone(case: str) -> tuple[Tensor, Any, set[str]]:
    return run_layer(case, by_engine=False)


@pytest.mark.parametrize("case", CASES)
def test_a_layer_with_the_packages_names_computes_what_the_local_one_does(case: str) -> None:
    output, grads, _ = alone(case)
    found, found_grads, names = run_layer(case, by_engine=True)
    assert names == NAMES.get(case, names)
    torch.testing.assert_close(found, output, **tolerances.of(torch.float64))
    expected = assemble_gradients([grads])
    for name, grad in assemble_gradients([found_grads]).items():
        torch.testing.assert_close(grad, expected.pop(name), **tolerances.of(torch.float64))
    assert not expected


def on_two_ranks(rank: int, world_size: int, case: str) -> Any:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    model_parallel_seed(1, tp_rank=rank)
    return run_layer(case, by_engine=True, sequence_parallel=True)[:2]


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_compute_what_one_does(case: str) -> None:
    output, grads, _ = alone(case)
    ranks = run_ranks(on_two_ranks, 2, case)
    both = torch.cat([found for found, _ in ranks])
    torch.testing.assert_close(both, output, **tolerances.of(torch.float64))
    expected = assemble_gradients([grads])
    for name, grad in assemble_gradients([grads for _, grads in ranks]).items():
        torch.testing.assert_close(grad, expected[name], **tolerances.of(torch.float64))


class Doubled(SelfAttention):
    """A project's attention, whose values are doubled."""

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, key_value_states: Any = None
    ) -> Any:
        query, key, value = super().get_query_key_value_tensors(hidden_states, key_value_states)
        return query, key, 2 * value


class Alone(SelfAttention):
    """A project's attention with a forward pass of its own."""

    def forward(self, hidden_states: Tensor, attention_mask: Any, **more: Any) -> Any:
        packed = more["packed_seq_params"]
        query, key, value = self.get_query_key_value_tensors(hidden_states)
        table: RotaryTable = self._table_of((more["rotary_pos_emb"],) * 2, hidden_states, packed)
        assert table.cos.shape[0] == len(hidden_states)
        query, key, value, _, kind, *_ = self._adjust_key_value_for_inference(
            None, query, key, value, None, None, None, None
        )
        if packed is not None:
            query, key, value = (x.squeeze(1) for x in (query, key, value))
        context = self._checkpointed_attention_forward(
            query, key, value, attention_mask, attn_mask_type=kind, packed_seq_params=packed
        )
        return self.linear_proj(context.reshape(len(context), -1, WIDTH))


def attention_of(kind: type[SelfAttention]) -> SelfAttention:
    config = tiny_config(**COMMON, num_query_groups=2)
    spec = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=True)
    spec = spec.submodules.self_attention
    spec.module = kind
    attention: SelfAttention = build_module(
        spec, config=config, layer_number=1, cp_comm_type="p2p", model_comm_pgs=None
    )
    name_parameters(attention)
    initialize_parameters(attention, seed=5)
    return attention


def test_what_a_project_overrides_takes_effect() -> None:
    hidden = torch.randn(LENGTH, 1, WIDTH, dtype=torch.float64)
    plain, doubled, own = map(attention_of, (SelfAttention, Doubled, Alone))
    angles = RotaryEmbedding(plain.hidden_size_per_attention_head)(LENGTH)
    expected, _ = plain(hidden, None, rotary_pos_emb=(angles, angles))
    found, _ = doubled(hidden, None, rotary_pos_emb=angles)
    torch.testing.assert_close(found, 2 * expected)
    unrotated, _ = plain(hidden, None)
    assert not torch.allclose(unrotated, expected)
    more = {"rotary_pos_emb": angles, "packed_seq_params": None}
    torch.testing.assert_close(own(hidden, None, **more)[0], unrotated)


def test_packed_tokens_rotate_by_their_place_in_the_sequence() -> None:
    hidden = torch.randn(LENGTH, 1, WIDTH, dtype=torch.float64)
    ends = torch.tensor([0, 3, LENGTH], dtype=torch.int32)
    packed = PackedSeqParams("thd", cu_seqlens_q=ends, cu_seqlens_kv=ends)
    attention = attention_of(SelfAttention)
    angles = RotaryEmbedding(attention.hidden_size_per_attention_head)(LENGTH)
    found, _ = attention(hidden, None, rotary_pos_emb=angles, packed_seq_params=packed)
    apart = [attention(x, None, rotary_pos_emb=angles[: len(x)])[0] for x in hidden.split([3, 5])]
    torch.testing.assert_close(found, torch.cat(apart))
    own = attention_of(Alone)
    more = {"rotary_pos_emb": angles, "packed_seq_params": packed}
    apart = [attention(x, None)[0] for x in hidden.split([3, 5])]
    torch.testing.assert_close(own(hidden, None, **more)[0], torch.cat(apart))


def test_a_model_has_the_names_that_converters_know() -> None:
    config = tiny_config(
        **COMMON | LATENT,
        num_moe_experts=2,
        moe_layer_freq=(0, 1),
        mtp_num_layers=1,
    )
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=True)
    ahead = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=True)
    model = GPTModel(
        config,
        spec,
        16,
        LENGTH,
        position_embedding_type="rope",
        mtp_block_spec=ahead,
        pg_collection=one_process_groups(),
    )
    names = {name for name, _ in model.named_parameters()}
    assert names == model.state_dict().keys()
    latent = NAMES["latent"]
    assert {f"decoder.layers.0.{name}" for name in latent} <= names
    sparse = {name for name in latent if ".linear_fc" not in name}
    sparse |= {"pre_mlp_layernorm.weight", "mlp.router.weight"}
    assert {f"decoder.layers.1.{name}" for name in sparse} <= names
    assert {f"mtp.layers.0.transformer_layer.{name}" for name in sparse} <= names
    rest = {name for name in names if ".layers." not in name}
    assert rest == {
        "embedding.word_embeddings.weight",
        "decoder.final_layernorm.weight",
        "output_layer.weight",
    }
    of_depth = {f"mtp.layers.0.{n}.weight" for n in ("enorm", "hnorm", "eh_proj")}
    assert of_depth | {"mtp.layers.0.final_layernorm.weight"} <= names
    model.load_state_dict(model.state_dict())


class OwnModel(nn.Module):
    """A project's own module, whose layers get their group."""

    def __init__(self, tp_group: Any) -> None:
        super().__init__()
        config = tiny_config(params_dtype=torch.float64)
        init: dict[str, Any] = {"config": config, "init_method": nn.init.xavier_normal_}
        sharded = {**init, "tp_group": tp_group}
        self.embedding = VocabParallelEmbedding(16, WIDTH, **sharded)
        self.up = ColumnParallelLinear(WIDTH, 4 * WIDTH, **sharded)
        self.down = RowParallelLinear(4 * WIDTH, WIDTH, **sharded, bias=False)
        self.gate = ReplicatedLinear(WIDTH, 2, **init, bias=True)
        with torch.no_grad():
            self.gate.weight.mul_(2)  # a constructor reads and changes the values

    def weights(self) -> dict[str, Tensor]:
        return {name: param.detach() for name, param in self.named_parameters()}


def own_models(rank: int, world_size: int) -> list[dict[str, Tensor]]:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size)
    torch.manual_seed(7)
    group = parallel_state.get_tensor_model_parallel_group()
    return [OwnModel(group).weights() for _ in range(2)]


def test_layers_outside_a_model_have_the_initial_values_of_one_rank() -> None:
    ((expected, others),) = run_ranks(own_models, 1)
    for name, value in expected.items():
        std = 0.0 if "bias" in name else (2 / sum(value.shape)) ** 0.5 * (1 + ("gate" in name))
        assert abs(float(value.std()) - std) <= 0.2 * std, name
        assert std == 0 or not torch.equal(others[name], value)
    (first, _), (second, _) = run_ranks(own_models, 2)
    for name, value in expected.items():
        dim = 1 if name == "down.weight" else 0
        parts = [first[name], second[name]]
        found = parts[0] if "gate" in name else torch.cat(parts, dim)
        assert torch.equal(found, value), name


def rolled_by_ranks(rank: int, world_size: int) -> list[list[int]]:
    parallel_state.initialize_model_parallel(context_parallel_size=2)
    mine = torch.tensor([[0, 1, 6, 7], [2, 3, 4, 5]])[rank][None]
    group = parallel_state.get_context_parallel_group()
    once, total = roll_tensor(mine, cp_group=group)
    assert total == once.sum()
    return [once[0].tolist(), roll_tensor(once.t(), dims=0, cp_group=group)[0].flatten().tolist()]


def test_tokens_are_shifted_over_the_ranks_that_share_a_sequence() -> None:
    alone, total = roll_tensor(torch.arange(8)[None])
    assert alone[0].tolist() == [1, 2, 3, 4, 5, 6, 7, 0]
    assert total == 28
    found = run_ranks(rolled_by_ranks, 2)
    assert found == [[[1, 2, 7, 0], [2, 3, 0, 0]], [[3, 4, 5, 6], [4, 5, 6, 7]]]

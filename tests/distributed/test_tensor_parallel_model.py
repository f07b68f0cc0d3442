"""A GPT on two tensor-parallel ranks computes what one process computes."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.models.gpt.gpt_layer_specs import LOCAL, decoder_block_of
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.parallel.process_groups_config import create_process_groups, make_grids
from megatron.core.tensor_parallel.random import model_parallel_seed
from tests.support import tolerances
from tests.support.one_process import one_process_groups, tiny_config
from tests.support.ranks import run_ranks
from tests.support.sharded import assemble_gradients, assemble_values, gradients, values

VOCABULARY = 101
LLAMA = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": F.silu,
    "add_bias_linear": False,
    "num_query_groups": 2,
    "ffn_hidden_size": 88,
}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gpt2": ({}, {"share_embeddings_and_output_weights": True}),
    "llama": (LLAMA, {"position_embedding_type": "rope"}),
    "qk_norm": ({**LLAMA, "qk_layernorm": True}, {"position_embedding_type": "rope"}),
    "wide_qk_norm": (
        {**LLAMA, "qk_layernorm_full_width": True, "layer_norm_placement": "post"},
        {"position_embedding_type": "rope"},
    ),
    "windows_with_another_rotary_base": (
        {
            **{**LLAMA, "qk_layernorm": True, "window_size": (5, 0)},
            **{"window_attn_skip_freq": 2, "window_rotary_base": 50.0},
        },
        {"position_embedding_type": "rope", "rotary_base": 1000},
    ),
    "scaled_queries_normed_after_rotation": (
        {
            **{**LLAMA, "qk_layernorm": True, "qk_layernorm_after_rope": True},
            **{"residual_scale": 0.3, "rope_type": "yarn", "rotary_scaling_factor": 4.0},
            **{"yarn_original_max_position_embeddings": 4, "yarn_query_scaling_beta": 0.5},
        },
        {"position_embedding_type": "rope"},
    ),
    "alibi": ({"layer_norm_placement": "sandwich"}, {"position_embedding_type": "alibi"}),
    "linear_attention": (
        {
            **{**LLAMA, "experimental_attention_variant": "gated_delta_net"},
            **{"linear_attention_freq": 2, "attention_output_gate": True, "qk_layernorm": True},
            **{"linear_key_head_dim": 6, "linear_value_head_dim": 4},
            **{"linear_num_key_heads": 2, "linear_num_value_heads": 6},
        },
        {"position_embedding_type": "rope"},
    ),
    "sparse_attention": (
        {
            **{"multi_latent_attention": True, "q_lora_rank": 12, "kv_lora_rank": 8},
            **{"qk_head_dim": 8, "qk_pos_emb_head_dim": 4, "v_head_dim": 6, "qk_layernorm": True},
            **{"experimental_attention_variant": "dsa", "dsa_indexer_n_heads": 6},
            **{"dsa_indexer_head_dim": 8, "dsa_indexer_topk": 5, "dsa_indexer_loss_coeff": 0.5},
            **{"normalization": "RMSNorm", "init_method_std": 0.3},
            "dsa_indexer_use_sparse_loss": True,
        },
        {"position_embedding_type": "rope"},
    ),
    "hyper_connections": (
        {
            **{**LLAMA, "enable_mhc_connections": True, "mhc_num_residual_streams": 3},
            **{"mhc_init_gating_factor": 0.5, "mhc_recompute_layer_num": 2},
        },
        {"position_embedding_type": "rope"},
    ),
    "kda": (
        {
            **{**LLAMA, "experimental_attention_variant": "kda", "linear_attention_freq": 2},
            **{"linear_key_head_dim": 6, "linear_value_head_dim": 4},
            **{"linear_num_key_heads": 2, "linear_num_value_heads": 2},
        },
        {"position_embedding_type": "rope"},
    ),
    "softcap": (
        {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0, "embedding_scale": 0.0},
        {"position_embedding_type": "none"},
    ),
}


def build(case: str, groups: Any, padded: int, **changes: Any) -> GPTModel:
    layer, model = CASES[case]
    # In float64 the order of sums does not hide a term that is wrong or missing.
    config = tiny_config(**layer, params_dtype=torch.float64, **changes)
    torch.manual_seed(1234)
    return GPTModel(
        config,
        decoder_block_of(LOCAL, config),
        padded,
        16,
        pg_collection=groups,
        unpadded_vocab_size=VOCABULARY,
        **model,
    )


def batch() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(0, VOCABULARY, (2, 17), generator=generator)
    return ids[:, :-1], ids[:, 1:], torch.arange(16).expand(2, 16)


def loss_and_gradients(model: GPTModel) -> tuple[Tensor, dict[str, Any]]:
    tokens, labels, positions = batch()
    loss = model(tokens, positions, None, labels=labels)
    (loss * torch.linspace(0.5, 1.5, loss.numel()).view(loss.shape)).mean().backward()
    return loss.detach(), gradients(model)


@functools.cache
def alone(case: str) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    model = build(case, one_process_groups(), 104)
    start = assemble_values([values(model)])
    loss, grads = loss_and_gradients(model)
    return loss, assemble_gradients([grads]), start


def one_of_two(
    rank: int, world_size: int, case: str, sequence_parallel: bool, chunk: int = 0
) -> Any:
    groups = create_process_groups(*make_grids(world_size, tp=2))
    changes = {"tensor_model_parallel_size": 2, "sequence_parallel": sequence_parallel}
    model = build(case, groups, 128, **changes, loss_chunk_size=chunk)
    start = values(model)
    return *loss_and_gradients(model), start


@pytest.mark.feature(
    "Layouts: tensor parallelism has the loss and gradients of one process, to 1e-12"
)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_two_ranks_give_the_loss_and_gradients_of_one(case: str, sequence_parallel: bool) -> None:
    loss, grads, start = alone(case)
    ranks = run_ranks(one_of_two, 2, case, sequence_parallel)
    split_start = assemble_values([r[2] for r in ranks])
    assert start.keys() == split_start.keys()
    for name in start:
        assert torch.equal(start[name], split_start[name]), name
    for rank in ranks:
        torch.testing.assert_close(rank[0], loss, **tolerances.of(torch.float64))
    split_grads = assemble_gradients([r[1] for r in ranks])
    for name in grads:
        torch.testing.assert_close(
            split_grads[name],
            grads[name],
            **tolerances.of(torch.float64),
            msg=lambda m, name=name: f"{name}: {m}",
        )
        assert grads[name].abs().max() > 0, f"{name} gets no gradient"


@pytest.mark.feature("Memory: a loss in chunks of tokens, logits never whole: the same gradients")
@pytest.mark.parametrize("chunk_size", [5, 16])
@pytest.mark.parametrize("case", ["gpt2", "llama", "softcap"])
def test_a_loss_in_chunks_is_the_same(case: str, chunk_size: int) -> None:
    loss, grads, _ = alone(case)
    ranks = run_ranks(one_of_two, 2, case, chunk_size == 5, chunk_size)
    torch.testing.assert_close(ranks[0][0], loss, **tolerances.of(torch.float64))
    found = assemble_gradients([r[1] for r in ranks])
    for name in grads:
        torch.testing.assert_close(found[name], grads[name], **tolerances.of(torch.float64))


@pytest.mark.feature("Layouts: a loss that does not depend on vocabulary padding")
def test_the_loss_does_not_depend_on_padding() -> None:
    for padded in (101, 104, 256):
        loss, _ = loss_and_gradients(build("gpt2", one_process_groups(), padded))
        torch.testing.assert_close(loss, alone("gpt2")[0], **tolerances.of(torch.float64))


def gathered_logits(rank: int, world_size: int) -> Tensor:
    groups = create_process_groups(*make_grids(world_size, tp=2))
    model = build("llama", groups, 128, tensor_model_parallel_size=2).eval()
    tokens, _, positions = batch()
    with torch.no_grad():
        divided = model(tokens, positions, None)
        whole = model(tokens, positions, None, runtime_gather_output=True)
    assert divided.shape == (2, 16, 64)
    torch.testing.assert_close(divided[..., :37], whole[..., rank * 64 : rank * 64 + 37])
    if rank == 1:
        assert divided[..., 37:].isneginf().all()
    return whole


def test_gathered_logits_are_those_of_one_process_without_padding() -> None:
    tokens, _, positions = batch()
    with torch.no_grad():
        expected = build("llama", one_process_groups(), 104).eval()(tokens, positions, None)
    assert expected.shape == (2, 16, VOCABULARY)
    for logits in run_ranks(gathered_logits, 2):
        torch.testing.assert_close(logits, expected, **tolerances.of(torch.float64))


def losses_with_dropout(rank: int, world_size: int, sequence_parallel: bool) -> Any:
    groups = create_process_groups(*make_grids(world_size, tp=2))
    model_parallel_seed(3, tp_rank=rank)
    changes = {"sequence_parallel": sequence_parallel, "recompute_granularity": "selective"}
    dropout = {"hidden_dropout": 0.3, "attention_dropout": 0.3}
    model = build("gpt2", groups, 104, **changes, **dropout)
    seen: list[Tensor] = []
    model.decoder.layers[0].register_forward_hook(lambda _m, _i, out: seen.append(out[0]))
    loss, _ = loss_and_gradients(model)
    return loss, seen[0].detach()


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_ranks_agree_on_what_is_dropped_from_what_they_share(sequence_parallel: bool) -> None:
    (loss0, layer0), (loss1, layer1) = run_ranks(losses_with_dropout, 2, sequence_parallel)
    torch.testing.assert_close(loss0, loss1, **tolerances.of(torch.float64))
    if not sequence_parallel:
        torch.testing.assert_close(layer0, layer1, **tolerances.of(torch.float64))
    assert layer0.shape[0] == (8 if sequence_parallel else 16)
    assert not torch.allclose(loss0, alone("gpt2")[0], atol=1e-3)

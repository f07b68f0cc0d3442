"""A GPT whose sequences lie on several ranks: positions, packing, dropout, what it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core.config.errors import ConfigError
from megatron.core.inference.contexts.static_context import StaticInferenceContext
from megatron.core.models.gpt.gpt_layer_specs import (
    LOCAL,
    decoder_block_of,
    get_gpt_layer_local_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.mamba import MambaModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parallel import parallel_state
from megatron.core.parallel.process_groups_config import (
    ProcessGroupCollection,
    create_process_groups,
    make_grids,
)
from megatron.core.tensor_parallel.random import (
    fork_for_tokens,
    model_parallel_cuda_manual_seed,
)
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.utils import get_batch_on_this_cp_rank
from tests.support import tolerances
from tests.support.one_process import one_process_groups, tiny_config
from tests.support.ranks import run_ranks

LENGTH, VOCABULARY, DOCUMENTS = 16, 50, ((16,), (4, 8, 4))
LONGROPE = {
    "longrope_short_factor": (1.0, 1.1, 1.2, 1.3),
    "longrope_long_factor": (2.0, 2.5, 3.0, 3.5),
    "longrope_original_max_position_embeddings": 10,  # between a rank's share and the whole
}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "learned": ({}, {}),
    "rope": ({}, {"position_embedding_type": "rope"}),
    "half_rotated_in_pairs": (
        {"rotary_interleaved": True, "no_rope_freq": 2},
        {"position_embedding_type": "rope", "rotary_percent": 0.5},
    ),
    "longrope": (LONGROPE, {"position_embedding_type": "rope"}),
    "scaled_queries": (
        {
            **{"rope_type": "yarn", "rotary_scaling_factor": 4.0, "yarn_query_scaling_beta": 0.5},
            "yarn_original_max_position_embeddings": 3,
        },
        {"position_embedding_type": "rope"},
    ),
    "alibi": ({}, {"position_embedding_type": "alibi"}),
    "linear_attention": (
        {
            **{"experimental_attention_variant": "gated_delta_net", "linear_attention_freq": 2},
            **{"linear_key_head_dim": 6, "linear_value_head_dim": 4},
            **{"linear_num_key_heads": 2, "linear_num_value_heads": 6},
            **{"attention_output_gate": True},
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
        },
        {"position_embedding_type": "rope"},
    ),
    "kda": (
        {
            **{"experimental_attention_variant": "kda", "linear_attention_freq": 2},
            **{"linear_key_head_dim": 6, "linear_value_head_dim": 4},
            **{"linear_num_key_heads": 2, "linear_num_value_heads": 2},
        },
        {"position_embedding_type": "rope"},
    ),
    "states_of_linear_attention": (
        {
            **{"experimental_attention_variant": "gated_delta_net"},
            **{"linear_key_head_dim": 6, "linear_value_head_dim": 4},
            **{"linear_num_key_heads": 1, "linear_num_value_heads": 3},
        },
        {"position_embedding_type": "rope"},
    ),
    "states_of_kda": (
        {
            **{"experimental_attention_variant": "kda"},
            **{"linear_key_head_dim": 6, "linear_value_head_dim": 4},
            **{"linear_num_key_heads": 1, "linear_num_value_heads": 1},
        },
        {"position_embedding_type": "rope"},
    ),
}
# Heads that two ranks cannot divide: a chunk passes its state on, which needs whole sequences.
WHOLE = ("states_of_linear_attention", "states_of_kda")


def build(case: str, groups: Any, **changes: Any) -> GPTModel:
    layer, model = CASES[case]
    config = tiny_config(params_dtype=torch.float64, num_query_groups=2, **layer, **changes)
    torch.manual_seed(1)
    return GPTModel(
        config,
        decoder_block_of(LOCAL, config),
        VOCABULARY,
        LENGTH,
        pg_collection=groups,
        **model,
    )


def batch(documents: tuple[int, ...]) -> dict[str, Tensor | None]:
    """Two sequences of ``documents`` of so many tokens."""
    length = sum(documents)
    ids = torch.randint(0, VOCABULARY, (2, length + 1), generator=torch.Generator().manual_seed(7))
    return {
        "tokens": ids[:, :-1],
        "labels": ids[:, 1:],
        "position_ids": torch.cat([torch.arange(n) for n in documents]).expand(2, length),
        "loss_mask": torch.linspace(0.5, 1.5, 2 * length, dtype=torch.float64).view(2, length),
        "attention_mask": None,
    }


def gradients(
    model: GPTModel | MambaModel, groups: Any, documents: tuple[int, ...]
) -> dict[str, Tensor]:
    """This rank's terms of the loss and of each gradient; several ``documents`` are packed."""
    ends = torch.tensor([0, *documents]).cumsum(0).int()
    is_packed = len(documents) > 1
    params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends) if is_packed else None
    lengths = None if params is None else params.lengths
    mine = get_batch_on_this_cp_rank(batch(documents), groups.cp, lengths=lengths)
    losses = model(
        mine["tokens"], mine["position_ids"], None, labels=mine["labels"], packed_seq_params=params
    )
    loss = (losses * mine["loss_mask"]).sum()
    loss.backward()
    named = {name: p.grad for name, p in model.named_parameters()}
    return {"loss": loss.detach(), **{n: g for n, g in named.items() if g is not None}}


def on_ranks(rank: int, size: int) -> dict[tuple[str, tuple[int, ...]], dict[str, Tensor]]:
    groups = ProcessGroupCollection(cp=dist.group.WORLD)  # a program's own, and no more
    results = {}
    for case in CASES:
        for documents in DOCUMENTS[: 1 if case in WHOLE else None]:
            model = build(case, groups, cp_comm_type=("p2p", "allgather"))
            results[case, documents] = found = gradients(model, groups, documents)
            for x in found.values():
                dist.all_reduce(x)
    return results


@pytest.mark.feature("Context parallelism: every kind of position, also in packed sequences")
def test_a_model_has_the_loss_and_gradients_of_one_process() -> None:
    found, _ = run_ranks(on_ranks, 2)
    for at, ours in found.items():
        alone = one_process_groups()
        expected = gradients(build(at[0], alone), alone, at[1])
        assert expected.keys() == ours.keys()
        torch.testing.assert_close(
            ours, expected, **tolerances.of(torch.float64), msg=lambda m, at=at: f"{at}: {m}"
        )


def draws(rank: int, size: int) -> tuple[int, list[tuple[float, ...]]]:
    """The seed of initial weights, and what hidden states and probabilities draw, two times."""
    parallel_state.initialize_model_parallel(2, context_parallel_size=2)
    numbers = []
    for _ in range(2):
        model_parallel_cuda_manual_seed(1234)
        drawn = [float(torch.rand(()))]
        for is_cut in (False, True):
            with fork_for_tokens(True, is_sequence_sharded=is_cut):
                drawn.append(float(torch.rand(())))
        numbers.append(tuple(drawn))
    return torch.initial_seed(), numbers


@pytest.mark.feature("Context parallelism: ranks with different tokens draw different dropout")
def test_ranks_with_other_tokens_draw_other_numbers() -> None:
    ranks = run_ranks(draws, 4)  # tp 0, tp 1 of cp 0, then of cp 1
    assert {seed for seed, _ in ranks} == {1234}
    assert all(first == again for _, (first, again) in ranks)
    default, hidden, cut = zip(*(numbers[0] for _, numbers in ranks), strict=True)
    assert len(set(default)) == 1
    assert hidden[0] == hidden[1] != hidden[2] == hidden[3]
    assert len(set(cut)) == 4


def refusals(rank: int, size: int) -> list[str]:
    groups = create_process_groups(*make_grids(size, cp=size))
    sentences = []

    class OwnCore(nn.Module):
        """A core that knows nothing of ranks."""

        def __init__(self, config: Any, layer_number: int, attn_mask_type: Any) -> None:
            super().__init__()

    def own_core() -> None:
        config = tiny_config()
        spec = get_gpt_layer_local_spec(config=config)
        attention = spec.submodules.self_attention
        parts: SelfAttentionSubmodules = replace(attention.submodules, core_attention=OwnCore)
        layers = replace(spec.submodules, self_attention=replace(attention, submodules=parts))
        spec = replace(spec, submodules=layers)
        GPTModel(config, spec, VOCABULARY, LENGTH, pg_collection=groups)

    model = build("rope", groups)
    half = torch.zeros(1, LENGTH // 2).long()
    whole = torch.zeros(1, LENGTH).long()
    hidden = torch.zeros(LENGTH // 2, 1, 32, dtype=torch.float64)
    square = torch.zeros(1, 1, LENGTH, LENGTH).bool()
    uneven = PackedSeqParams(cu_seqlens_q=torch.tensor([0, 6, 16]).int())
    share = PackedSeqParams(cu_seqlens_q=torch.tensor([0, 8]).int())
    for act in (
        own_core,
        lambda: build("rope", groups, cp_comm_type="ring"),
        lambda: model(whole, torch.arange(LENGTH)[None], None),
        lambda: model(half, half, square),
        lambda: model(half, half, None, packed_seq_params=uneven),
        lambda: model(half, half, None, packed_seq_params=share),
        lambda: model.decoder(hidden, attention_bias=torch.zeros(1, 4, 8, 16, requires_grad=True)),
        lambda: model(half, half, None, inference_context=StaticInferenceContext(1, LENGTH)),
    ):
        try:
            act()
            sentences.append("accepted")
        except ConfigError as error:
            sentences.append(str(error))
    return sentences


def test_what_cannot_be_divided_is_refused_with_its_cure() -> None:
    expected = (
        "core attention OwnCore does not support context parallelism; use DotProductAttention",
        "--cp-comm-type ring is not one of p2p, a2a, allgather, a2a+p2p",
        "received the positions 0 to 15, more than its share of 16; shard the batch by get_batch",
        "has 8 of 16 tokens: pass the rows of its own tokens",
        "a sequence of 6 tokens cannot be split into 2 x 2 chunks; pad each packed sequence",
        "cu_seqlens describe 8 tokens and the ranks of a context-parallel group hold 16",
        "an attention bias gets no gradient from other ranks; detach it",
        "generation needs --context-parallel-size 1",
    )
    for found, sentence in zip(run_ranks(refusals, 2)[0], expected, strict=True):
        assert sentence in found

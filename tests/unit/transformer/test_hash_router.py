"""Hash routing: experts by token id, weights by score, as in transformers' DeepSeek-V4."""

from __future__ import annotations

import pytest
import torch

from megatron.core.transformer.moe.hash_router import HashRouter
from tests.support import tolerances
from tests.support.one_process import one_process_groups, tiny_config

VOCABULARY, TOPK, EXPERTS, HIDDEN = 40, 3, 6, 32


def router() -> HashRouter:
    config = tiny_config(
        **{"num_moe_experts": EXPERTS, "moe_router_topk": TOPK, "add_bias_linear": False},
        **{"moe_router_score_function": "sqrtsoftplus", "moe_router_topk_scaling_factor": 1.5},
        **{"moe_router_enable_expert_bias": True, "init_method_std": 0.5},
    )
    made = HashRouter(config, pg_collection=one_process_groups())
    made.set_layer_number(2)
    made.make_table(VOCABULARY)
    return made


def test_choices_weights_and_gradients_are_those_of_transformers() -> None:
    theirs = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    ours = router()
    judge = theirs.DeepseekV4HashRouter(
        theirs.DeepseekV4Config(
            **{"hidden_size": HIDDEN, "n_routed_experts": EXPERTS, "num_experts_per_tok": TOPK},
            **{"vocab_size": VOCABULARY, "num_hidden_layers": 1, "routed_scaling_factor": 1.5},
        )
    )
    judge.weight.data.copy_(ours.weight.data)
    judge.tid2eid.copy_(ours.tid2eid)
    torch.manual_seed(1)
    x, ids = torch.randn(7, 2, HIDDEN), torch.randint(0, VOCABULARY, (2, 7))
    found = ours(x, token_ids=ids)
    _, weights, experts = judge(x.transpose(0, 1), ids)
    assert torch.equal(found.experts, experts.view(2, 7, TOPK).transpose(0, 1).flatten(0, 1))
    wanted = weights.view(2, 7, TOPK).transpose(0, 1).flatten(0, 1)
    torch.testing.assert_close(found.weights, wanted, **tolerances.of(torch.float32))
    slope = torch.randn_like(wanted)
    (found.weights * slope).sum().backward()
    (wanted * slope).sum().backward()
    torch.testing.assert_close(ours.weight.grad, judge.weight.grad, **tolerances.GRADIENT)


def test_a_table_names_different_experts_for_a_token_and_all_equally_often() -> None:
    table = router().tid2eid
    assert all(len({*row}) == TOPK for row in table.tolist())
    counts = table.flatten().bincount(minlength=EXPERTS)
    assert counts.min() > 0.5 * VOCABULARY * TOPK / EXPERTS
    assert torch.equal(table, router().tid2eid)


def test_a_pass_without_token_ids_says_what_is_missing() -> None:
    with pytest.raises(ValueError, match="needs the token ids: pass input_ids"):
        router()(torch.randn(3, 1, HIDDEN))

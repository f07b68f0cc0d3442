"""Routes: the engine records the experts of each token; a pass of training replays them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.inference.fast_linear import use_fast_linears
from megatron.core.inference.paged_engine.engine import Engine, EngineOptions
from megatron.core.inference.paged_engine.request import Request, RequestOutput
from megatron.core.inference.sampling_params import SamplingParams
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplayAction
from tests.support.ranks import run_ranks
from tests.unit.inference.test_engine import MOE, engine, stage

REPLAY = MOE | {"moe_enable_routing_replay": True, "moe_layer_freq": (0, 1, 1, 1)}
Found = dict[str, tuple[list[int], Tensor, list[float]]]  # tokens, routes, log-probs of new ones


def answers(made: Engine) -> Found:
    """Let forks share a prompt, with draft tokens and too few pages; rank 0 returns the routes."""
    if torch.distributed.is_initialized() and torch.distributed.get_rank():
        made.follow()
        return {}
    requests = []
    for i in range(6):
        params = SamplingParams(
            seed=i,
            temperature=float(i < 3),
            allowed_token_ids=(4, 5) if i > 2 else (),
            num_tokens_to_generate=9,
            ignore_eos=True,
            return_log_probs=True,
        )
        prompt = [(5 * j) % 9 + 2 for j in range(9)] if i < 4 else [7 + i] * i
        requests.append(Request(str(i), prompt, params, fork_of="0" if 0 < i < 4 else None))
    found: Found = {}
    new: dict[str, list[float]] = {r.request_id: [] for r in requests}
    ended: RequestOutput
    for ended in made.run_to_end(requests):
        new[ended.request_id] += [token.log_prob for token in ended.new]
        if ended.finish_reason is not None:
            request = requests[int(ended.request_id)]
            assert ended.routes is not None
            tokens = request.prompt + request.output
            found[ended.request_id] = tokens, torch.tensor(ended.routes), new[ended.request_id]
    made.close()
    return found


def in_layout(rank: int, world: int, sizes: dict[str, int]) -> Found:
    options = EngineOptions(
        page_size=4,
        records_routes=True,
        num_draft_tokens=3,
        buffer_bytes=48 << 10,
        max_requests=8,
        max_sequence_length=24,
    )
    made = engine(options, world, sizes, **REPLAY)
    found = answers(made)
    if rank == 0:
        preempted = sum(s.num_preemptions for s in made._schedulers.values())
        assert preempted or world > 1, "no request has lost its pages"
        stats = made.stats()
        assert 0 < stats.num_accepted_drafts < stats.num_drafts
    return found


def forward(
    model: GPTModel, tokens: list[int], routes: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities of all tokens but the first, and the experts of the rest."""
    routers = [m for m in model.modules() if isinstance(m, TopKRouter)]
    for router in routers:
        assert router.router_replay is not None
        router.router_replay.set_router_replay_action(RouterReplayAction.RECORD)
    ids = torch.tensor([tokens[:-1]])
    more: Any = None if routes is None else {"expert_routes": routes[None]}
    positions = torch.arange(ids.shape[1])[None]
    logits = model(ids, positions, None, extra_block_kwargs=more)[0].float()
    chosen = torch.zeros(len(tokens) - 1, model.config.num_layers, 2, dtype=torch.int64)
    for router in routers:
        assert router.router_replay is not None
        experts = router.router_replay.get_recorded_indices()
        assert experts is not None
        chosen[:, router.layer_number - 1] = experts
    scores = logits.log_softmax(-1).gather(-1, torch.tensor(tokens[1:])[:, None])
    return scores[:, 0].detach(), chosen


@pytest.mark.parametrize("sizes", [{}, {"pp": 2, "ep": 2}, {"tp": 2}])
def test_the_engine_records_the_experts_of_each_token_in_every_layout(
    sizes: dict[str, int],
) -> None:
    found = run_ranks(in_layout, 4 if "pp" in sizes else sizes.get("tp", 1), sizes)[0]
    model = stage(1, {}, **REPLAY).eval()
    assert len(found) == 6
    for tokens, routes, _ in found.values():
        assert routes.equal(forward(model, tokens)[1].short())


@pytest.mark.feature("RL: routes of rollouts in lower precision are replayed in training")
def test_replayed_routes_are_kept_where_a_near_tie_would_flip() -> None:
    made = engine(EngineOptions(page_size=4, records_routes=True), 1, {}, torch.float32, **REPLAY)
    model = stage(1, {}, torch.float32, **REPLAY).eval()
    for each in (made.model.module, model):
        for router in (m for m in each.modules() if isinstance(m, TopKRouter)):
            with torch.no_grad():  # two experts are almost the same choice
                router.weight[1] = router.weight[0] * (1 + 1e-4)
    use_fast_linears(made.model.module, "int8")
    num_flipped = 0
    gaps = torch.zeros(2)
    for tokens, routes, log_probs in answers(made).values():
        for i, given in enumerate((None, routes)):
            scores, chosen = forward(model, tokens, given)
            gaps[i] += (scores[-len(log_probs) :] - torch.tensor(log_probs)).abs().sum()
            if given is not None:
                assert chosen.equal(routes.long())
            else:
                num_flipped += int((chosen != routes).any(-1).sum())
    assert num_flipped
    assert gaps[1] < gaps[0] / 2

"""The engine: every layout gives each request the tokens that one process gives it alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.core import device
from megatron.core.inference.paged_engine.engine import Engine, EngineOptions
from megatron.core.inference.paged_engine.request import (
    Request,
    RequestError,
    RequestOutput,
    check_tokens,
)
from megatron.core.inference.paged_engine.runner import GenerationModel
from megatron.core.inference.sampling_params import SamplingParams
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.parallel.process_groups_config import create_process_groups, make_grids
from tests.support import selection
from tests.support.one_process import one_process_groups, tiny_config
from tests.support.ranks import run_ranks

VOCABULARY = 64
LENGTH = 40
Tokens = dict[str, list[tuple[int, float]]]
MOE = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_token_dispatcher_type": "alltoall"}
LAYOUTS: dict[str, tuple[int, dict[str, int], dict[str, Any]]] = {
    "tp2": (2, {"tp": 2}, {}),
    "pp2": (2, {"pp": 2}, {}),
    "tp2 pp2": (4, {"tp": 2, "pp": 2}, {}),
    "2 replicas": (2, {}, {}),
    "2 replicas of pp2": (4, {"pp": 2}, {}),
    "ep2": (2, {"ep": 2}, MOE),
    "ep2 pp2": (4, {"ep": 2, "pp": 2}, MOE),
    "pp2 of several streams": (2, {"pp": 2}, {"enable_mhc_connections": True}),
}


def stage(
    world: int, sizes: dict[str, int], dtype: torch.dtype = torch.float64, **changes: Any
) -> GPTModel:
    torch.manual_seed(7)
    groups = one_process_groups()
    if world > 1:
        groups = create_process_groups(*make_grids(world, **sizes))
    config = tiny_config(
        num_layers=4,
        init_method_std=0.3,
        params_dtype=dtype,
        tensor_model_parallel_size=sizes.get("tp", 1),
        pipeline_model_parallel_size=sizes.get("pp", 1),
        pipeline_dtype=dtype,
        expert_model_parallel_size=sizes.get("ep", 1),
        **changes,
    )
    pp = groups.pp
    return GPTModel(
        config,
        get_gpt_layer_local_spec(config.num_moe_experts, config=config),
        VOCABULARY,
        LENGTH,
        pre_process=pp.rank() == 0,
        post_process=pp.rank() == pp.size() - 1,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        pg_collection=groups,
    )


def engine(
    options: EngineOptions,
    world: int,
    sizes: dict[str, int],
    dtype: torch.dtype = torch.float64,
    **changes: Any,
) -> Engine:
    model = stage(world, sizes, dtype, **changes)
    return Engine(
        GenerationModel(
            module=model.eval(),
            config=model.config,
            groups=model.pg_collection,
            device=device.current(),
            vocab_size=VOCABULARY,
            max_sequence_length=LENGTH,
            eod=1,
        ),
        options,
    )


def requests() -> list[Request]:
    out = []
    for i in range(9):
        prompt = [(7 * i + 3 * j) % 60 + 2 for j in range(1 + 3 * i)]
        params = SamplingParams(
            temperature=0.0 if i % 2 else 0.9,
            top_k=0 if i % 3 else 20,
            seed=i,
            num_tokens_to_generate=5 + i,
            return_log_probs=True,
            ignore_eos=True,
            repetition_penalty=1.3 if i == 4 else 1.0,
        )
        out.append(Request(str(i), prompt, params))
    return out


def generated(
    rank: int, world: int, sizes: dict[str, int], changes: dict[str, Any], options: dict[str, Any]
) -> Tokens:
    made = engine(EngineOptions(page_size=4, **options), world, sizes, **changes)
    if rank:
        made.follow()
        return {}
    found = made.generate(requests())
    made.close()
    stats = made.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert stats.num_free_pages == stats.num_pages
    return {k: [(t.token, t.log_prob) for t in tokens] for k, tokens in found.items()}


def alone(changes: dict[str, Any]) -> Tokens:
    """Each request by itself, one page pool after the other."""
    made = engine(EngineOptions(page_size=4, max_requests=1), 1, {}, **changes)
    return {
        request.request_id: [
            (t.token, t.log_prob) for t in made.generate([request])[request.request_id]
        ]
        for request in requests()
    }


def assert_equal(found: Tokens, wanted: Tokens) -> None:
    for name, tokens in wanted.items():
        assert [t for t, _ in found[name]] == [t for t, _ in tokens], name
        assert [p for _, p in found[name]] == pytest.approx([p for _, p in tokens], abs=1e-5)


@pytest.mark.feature("Generation: the same tokens with TP, PP, EP and replicas as on one process")
@pytest.mark.parametrize(
    "name",
    selection.only(
        ["tp2 pp2", "2 replicas of pp2", "ep2 pp2", "tp2", "pp2 of several streams"], LAYOUTS
    ),
)
def test_every_layout_gives_the_tokens_of_one_process(name: str) -> None:
    world, sizes, changes = LAYOUTS[name]
    found = run_ranks(generated, world, sizes, changes, {"max_requests": 6})[0]
    assert_equal(found, alone(changes))


@pytest.mark.parametrize(
    "options",
    [
        {"max_step_tokens": 1, "max_requests": 3},
        {"max_step_tokens": 7},
        {"max_requests": 2},
        {"buffer_bytes": 11 * 4 * 4 * 2 * 32 * 8, "max_requests": 6},  # 11 pages: pre-emption
    ],
)
def test_limits_of_the_engine_change_no_token(options: dict[str, Any]) -> None:
    assert_equal(generated(0, 1, {}, {}, options), alone({}))


def routed(rank: int, world: int) -> list[int]:
    """Return how many prompt tokens each request found in pages."""
    made = engine(EngineOptions(page_size=4, max_requests=8), world, {})
    if rank:
        made.follow()
        return []
    params = SamplingParams(num_tokens_to_generate=2, seed=1)
    prompts = [[5] * 12, [9] * 12]
    made.generate(Request(f"first {i}", prompt, params) for i, prompt in enumerate(prompts))
    cached: dict[str, int] = {}
    for i in range(6):
        made.add(Request(str(i), [*prompts[i % 2], i], params))
    while made.has_unfinished:
        for output in made.step():
            cached.setdefault(output.request_id, output.num_cached_prompt_tokens)
    made.close()
    return [cached[str(i)] for i in range(6)]


def test_a_request_goes_to_the_replica_that_knows_its_prompt() -> None:
    assert run_ranks(routed, 2)[0] == [12] * 6


def test_only_requests_with_the_same_salt_share_pages() -> None:
    made = engine(EngineOptions(page_size=4), 1, {})
    params = SamplingParams(num_tokens_to_generate=1, seed=1)

    def num_cached(name: str, salt: str) -> int:
        made.add(Request(name, [5] * 12, params, cache_salt=salt))
        outputs = [
            output for _ in iter(lambda: made.has_unfinished, False) for output in made.step()
        ]
        return outputs[0].num_cached_prompt_tokens

    assert [num_cached(str(i), salt) for i, salt in enumerate(["", "a", "b", "a", ""])] == [
        *(0, 0, 0),
        *(8, 8),
    ]


@pytest.mark.parametrize(
    ("prompt", "params", "param", "text"),
    [
        ([2, VOCABULARY], {}, "prompt", "prompt has token 64: .* are 0 to 63"),
        ([-1, 3], {}, "prompt", "prompt has token -1: "),
        ([2], {"logit_bias": {64: 1.0}}, "logit_bias", "logit_bias has token 64: "),
        ([2], {"logit_bias": {-1: 1.0}}, "logit_bias", "logit_bias has token -1: "),
        ([2], {"logit_bias": {3: 101.0}}, "logit_bias", "token 3 is 101.0: .* from -100 to 100"),
        ([2], {"logit_bias": {3: float("nan")}}, "logit_bias", "token 3 is nan: "),
        ([2], {"allowed_token_ids": (64,)}, "allowed_token_ids", "has token 64: "),
        ([2], {"bad_words": ((1, 2), (3, 64))}, "bad_words", "has token 64: "),
        (
            [2],
            {"allowed_token_ids": (5, 6), "bad_words": ((6,), (5,), (7, 8))},
            "allowed_token_ids",
            "every token of allowed_token_ids: allow another",
        ),
        ([2], {"stop_token_ids": (2, 64)}, "stop_token_ids", "stop_token_ids has token 64: "),
    ],
)
def test_tokens_that_the_model_does_not_have_are_refused(
    prompt: list[int], params: dict[str, Any], param: str, text: str
) -> None:
    request = Request("a", prompt, SamplingParams(**params))
    with pytest.raises(RequestError, match=text) as error:
        check_tokens(request, VOCABULARY)
    assert error.value.param == param


def test_a_request_with_an_unknown_token_does_not_disturb_others() -> None:
    serving = engine(EngineOptions(max_step_tokens=16), 1, {})
    good, *_ = requests()
    serving.add(good)
    with pytest.raises(RequestError, match="prompt has token 64"):
        serving.add(Request("bad", [VOCABULARY], SamplingParams()))
    ends = []
    while serving.has_unfinished:
        ends += [out.finish_reason for out in serving.step() if out.finish_reason]
    assert ends == ["length"]


@pytest.mark.parametrize("params", [{"prompt_log_probs_only": True}, {"num_tokens_to_generate": 3}])
def test_prompt_tokens_without_finite_logits_are_an_error_not_a_score(
    params: dict[str, Any],
) -> None:
    made = engine(EngineOptions(page_size=4, max_step_tokens=2), 1, {})
    with torch.no_grad():
        made.model.module.embedding.word_embeddings.weight[7].fill_(float("nan"))
    found: dict[str, RequestOutput] = {}
    for name, prompt in {"bad": [5, 7, 6, 6, 6], "good": [5, 6, 6, 6, 6]}.items():
        made.add(
            Request(name, prompt, SamplingParams(return_prompt_log_probs=True, seed=1, **params))
        )
    while made.has_unfinished:
        found |= {out.request_id: out for out in made.step() if out.finish_reason}
    assert (found["bad"].finish_reason, found["bad"].prompt_scores) == ("error", ())
    assert "finite" in found["bad"].error
    assert found["good"].finish_reason == "length"
    stats = made.stats()
    assert stats.num_free_pages == stats.num_pages


def test_the_scores_of_a_prompt_do_not_read_the_row_of_its_last_token() -> None:
    params = SamplingParams(prompt_log_probs_only=True, return_prompt_log_probs=True, seed=1)
    found = []
    for is_bad in (False, True):
        made = engine(EngineOptions(page_size=4), 1, {})
        if is_bad:
            with torch.no_grad():
                made.model.module.embedding.word_embeddings.weight[7].fill_(float("nan"))
        made.add(Request("a", [5, 6, 7], params))
        (out,) = made.step()
        found.append((out.finish_reason, [score.log_prob for score in out.prompt_scores]))
    assert found[0] == found[1]
    assert found[0][0] == "length"

"""Scripts written for Megatron Core's engines: texts, log-probabilities, streams, layouts."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron.core.config.errors import ConfigError
from megatron.core.diagnostics import log_once
from megatron.core.inference.contexts.dynamic_context import (
    ActiveRequestCountOverflowError,
    ChunkOverflowError,
    ContextOverflowError,
    MaxSequenceLengthOverflowError,
)
from megatron.core.inference.engines import DynamicInferenceEngine, StaticInferenceEngine
from megatron.core.inference.inference_request import InferenceRequest, Status
from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import (
    GPTInferenceWrapper,
)
from megatron.core.inference.paged_engine.request import RequestError
from megatron.core.inference.paged_engine.runner import ModelRunner
from megatron.core.inference.paged_engine.step_plan import StepPlan
from megatron.core.inference.sampling_params import SamplingParams
from megatron.core.inference.scheduler import Scheduler
from tests.support import scripts_for_megatron as scripts
from tests.support import selection
from tests.support.ranks import run_ranks
from tests.support.scripts_for_megatron import LENGTH, PROMPTS, Letters

GREEDY = SamplingParams(top_k=1, num_tokens_to_generate=6)
LAYOUTS = {"tp2": {"tp": 2}, "pp2": {"pp": 2}}


def static_engine(**sizes: Any) -> StaticInferenceEngine:
    return StaticInferenceEngine(scripts.controller_of(scripts.model_of(1, {}), **sizes))


def dynamic_engine(**sizes: Any) -> DynamicInferenceEngine:
    controller = scripts.controller_of(scripts.model_of(1, {}))
    return DynamicInferenceEngine(controller, scripts.context_of(**sizes), None, False)


def by_hand(
    prompt: str, count: int, model: torch.nn.Module | None = None
) -> tuple[list[int], list[float], list[float]]:
    """Greedy tokens and log-probs of prompt and output, from forward passes without a cache."""
    model = (scripts.model_of(1, {}) if model is None else model).eval()
    tokens = Letters().tokenize(prompt)
    num_prompt = len(tokens)
    with torch.no_grad():
        for _ in range(count):
            tokens.append(int(logits_of(model, tokens)[-1].argmax()))
            if tokens[-1] == Letters.eod:
                break
        log_probs = logits_of(model, tokens).log_softmax(-1)
    found = [float(log_probs[i, t]) for i, t in enumerate(tokens[1:])]
    output = [t for t in tokens[num_prompt:] if t != Letters.eod]
    return output, found[: num_prompt - 1], found[num_prompt - 1 :][: len(output)]


def logits_of(model: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    ids = torch.tensor([tokens])
    logits: torch.Tensor = model(ids, torch.arange(len(tokens))[None], None)
    return logits[0]


def assert_same(found: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    assert len(found) == len(wanted)
    for mine, theirs in zip(found, wanted, strict=True):
        for name, value in theirs.items():
            if name.endswith("log_probs") and value is not None:
                assert mine[name] == pytest.approx(value, abs=1e-5), name
            elif "top_n" in name and value is not None:
                for a, b in zip(mine[name], value, strict=True):
                    assert a == pytest.approx(b, abs=1e-5), name
            else:
                assert mine[name] == value, name


@pytest.mark.feature("Generation: scripts written for Megatron Core's static engine run")
def test_a_static_script_gets_every_field_of_its_answers() -> None:
    answers = scripts.static_script(0, 1, {}, False)
    assert [a["prompt"] for a in answers] == PROMPTS
    for answer in answers:
        tokens, prompt_log_probs, log_probs = by_hand(answer["prompt"], 9)
        assert answer["generated_tokens"] == tokens
        assert answer["generated_log_probs"] == pytest.approx(log_probs, abs=1e-5)
        assert answer["prompt_log_probs"] == pytest.approx(prompt_log_probs, abs=1e-5)
        assert answer["generated_length"] == answer["tpot"] == len(tokens)
        assert answer["status"] is Status.COMPLETED
        assert answer["generated_text"] == Letters().detokenize(tokens)
        assert answer["text"] == answer["prompt"] + answer["generated_text"]
        assert "".join(answer["generated_segments"]) == answer["generated_text"]
        assert len(answer["segments"]) == len(answer["prompt"]) + len(tokens)
        assert all(len(top) == 2 for top in answer["generated_top_n_logprobs"])
        assert len(answer["prompt_top_n_logprobs"]) == len(answer["prompt"]) - 1
        for segment, top in zip(
            answer["generated_segments"], answer["generated_top_n_logprobs"], strict=True
        ):
            assert segment == max(top, key=lambda text: top[text])


def test_an_attention_core_that_a_project_has_changed_answers() -> None:
    model = scripts.model_of(1, {})
    core = model.decoder.layers[0].self_attention.core_attention
    core.register_forward_hook(lambda module, given, output: -3 * output)
    engine = StaticInferenceEngine(scripts.controller_of(model))
    (answer,) = engine.generate(PROMPTS[:1], sampling_params=GREEDY)
    changed = by_hand(PROMPTS[0], 6, model)[0]
    assert changed != by_hand(PROMPTS[0], 6)[0]
    assert [t for t in answer.generated_tokens if t != Letters.eod] == changed


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_ranks_get_the_answers_of_one_process(layout: str) -> None:
    wanted = scripts.static_script(0, 1, {}, True)
    for found in run_ranks(scripts.static_script, 2, LAYOUTS[layout], True):
        assert_same(found, wanted)


def test_ranks_that_share_experts_get_the_answers_of_one_process() -> None:
    moe = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_token_dispatcher_type": "alltoall"}
    wanted = scripts.static_script(0, 1, {}, True, moe)
    for found in run_ranks(scripts.static_script, 2, {"ep": 2}, True, moe):
        assert_same(found, wanted)


@pytest.mark.feature("Generation: scripts written for Megatron Core's dynamic engine run")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_requests_that_arrive_later_get_the_same_answers_on_all_ranks(layout: str) -> None:
    wanted = scripts.dynamic_script(0, 1, {})
    for answer in wanted:
        tokens, prompt_log_probs, log_probs = by_hand(answer["prompt"], 9)
        assert [t for t in answer["generated_tokens"] if t != Letters.eod] == tokens
        assert answer["generated_log_probs"] == pytest.approx(log_probs, abs=1e-5)
        assert answer["prompt_log_probs"] == pytest.approx(prompt_log_probs, abs=1e-5)
    for found in run_ranks(scripts.dynamic_script, 2, LAYOUTS[layout]):
        assert_same(found, wanted)


@pytest.mark.parametrize(("world", "sizes"), [(2, {}), (6, {"pp": 3})], ids=["dp2", "dp2 pp3"])
def test_data_parallel_ranks_generate_independently(world: int, sizes: dict[str, int]) -> None:
    found = run_ranks(scripts.replicas_script, world, sizes)
    engine = static_engine()
    texts = [r.generated_text for r in engine.generate(PROMPTS[:3], sampling_params=GREEDY)]
    for rank in range(world):
        expected = texts[1:3] if rank % 2 else texts[:1]
        assert [text[:5] for text in expected] == found[rank]


def test_requests_of_one_call_can_have_their_own_parameters() -> None:
    engine = static_engine()
    requests = [
        InferenceRequest(
            request_id=engine.get_new_request_id(),
            prompt="hello",
            sampling_params=replace(GREEDY, num_tokens_to_generate=n),
        )
        for n in (2, 5)
    ]
    answers = engine.generate(inference_requests=requests)
    assert [a.generated_length for a in answers] == [2, 5]
    assert answers[0] is requests[0]


def test_a_seed_repeats_sampled_texts() -> None:
    controller = scripts.controller_of(scripts.model_of(1, {}))
    params = SamplingParams(temperature=2.0, num_tokens_to_generate=20)
    texts = []
    for seed in (1, 1, 2):
        engine = StaticInferenceEngine(controller, random_seed=seed)
        texts.append(engine.generate(["hello"], sampling_params=params)[0].generated_text)
    assert texts[0] == texts[1] != texts[2]


def test_weights_may_change_between_two_calls() -> None:
    model = scripts.model_of(1, {})
    engine = StaticInferenceEngine(scripts.controller_of(model))
    before = engine.generate([PROMPTS[2]], sampling_params=GREEDY)[0].generated_text
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-1.3)
    fresh = StaticInferenceEngine(scripts.controller_of(model))
    wanted = fresh.generate([PROMPTS[2]], sampling_params=GREEDY)[0].generated_text
    assert engine.generate([PROMPTS[2]], sampling_params=GREEDY)[0].generated_text == wanted
    assert wanted != before


def test_a_request_shares_the_prompt_of_one_that_still_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows: list[int] = []
    execute = ModelRunner.execute

    def counted(self: ModelRunner, plan: StepPlan) -> Any:
        rows.append(sum(len(s.tokens) for s in plan.segments))
        return execute(self, plan)

    monkeypatch.setattr(ModelRunner, "execute", counted)
    engine = dynamic_engine(chunk_size_tokens=4)
    prompt = "the same beginning"
    for number in range(2):
        engine.add_request(number, prompt, 8)
        engine.step(GREEDY)
    assert rows[-2] == len(prompt)
    assert rows[-1] < 6  # the second prompt's last page, and a token of the first request
    while engine.has_unfinished_requests():
        engine.step(GREEDY)
    engine.add_request(2, prompt, 8)  # the weights may have changed: nothing is shared
    engine.step(GREEDY)
    assert rows[-1] == len(prompt)


def test_a_model_that_has_generated_trains_as_before() -> None:
    losses = []
    for generates in (False, True):
        model = scripts.model_of(1, {})
        if generates:
            StaticInferenceEngine(scripts.controller_of(model)).generate([PROMPTS[0]])
        logits_of(model.train(), [1, 2, 3]).square().mean().backward()
        losses.append([parameter.grad for parameter in model.parameters()])
    for one, other in zip(*losses, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("reader", ["beside the engine", "after the engine"])
def test_a_stream_gives_the_text_after_each_token(reader: str) -> None:
    engine = static_engine()

    async def read() -> list[InferenceRequest]:
        request_id = engine.add_request("hello", sampling_params=GREEDY, streaming=True)
        engine.add_request("tensor", sampling_params=GREEDY)
        task = asyncio.create_task(engine.run_engine_async())
        if reader == "after the engine":
            await task
        found = [partial async for partial in engine.get_stream_generator(request_id)]
        await task
        assert not engine.scheduler.streams
        return found

    found = asyncio.run(read())
    wanted = by_hand("hello", 6)[0]
    assert [p.generated_length for p in found] == list(range(1, len(wanted) + 1))
    for partial in found:
        assert partial.generated_text == Letters().detokenize(wanted[: partial.generated_length])
    assert len(engine.scheduler.completed_request_pool) == 2


def test_an_error_of_a_request_reaches_its_stream_and_leaves_the_engine_usable() -> None:
    engine = static_engine()

    async def read() -> None:
        request_id = engine.add_request("x" * LENGTH, sampling_params=GREEDY, streaming=True)
        engine.add_request("hello", sampling_params=GREEDY)
        stream = engine.get_stream_generator(request_id)
        task = asyncio.create_task(engine.run_engine_async())
        with pytest.raises(RequestError, match="prompt has 64 tokens"):
            async for _ in stream:
                pass
        with pytest.raises(RequestError):
            await task

    asyncio.run(read())
    assert engine.generate(["hello"], sampling_params=GREEDY)[0].status is Status.COMPLETED


def test_run_engine_of_a_dynamic_engine_resolves_futures_until_it_is_cancelled() -> None:
    engine = dynamic_engine()

    async def serve() -> list[str | None]:
        task = asyncio.create_task(engine.run_engine(GREEDY))
        first = await engine.add_request(0, "hello")
        second = await engine.add_request(1, Letters().tokenize("wo"), 3)
        task.cancel()
        return [first.generated_text, second.generated_text]

    texts = asyncio.run(serve())
    assert texts == [
        Letters().detokenize(by_hand("hello", 6)[0]),
        Letters().detokenize(by_hand("wo", 3)[0]),
    ]


def test_generate_of_a_dynamic_engine_returns_all_requests() -> None:
    engine = dynamic_engine()
    for _ in range(2):
        answers = engine.generate(PROMPTS, replace(GREEDY, num_tokens_to_generate=4))
        by_prompt = {a.prompt: a.generated_text for a in answers}
        assert by_prompt == {p: Letters().detokenize(by_hand(p, 4)[0]) for p in PROMPTS}
        assert engine.context.get_active_request_count() == 0


def test_a_dynamic_request_that_cannot_fit_raises_megatrons_error() -> None:
    engine = dynamic_engine()
    with pytest.raises(MaxSequenceLengthOverflowError, match="60 tokens and asks for 5"):
        engine.add_request(0, "x" * 60, 5)
    small = dynamic_engine(buffer_size_gb=2 * 8 * 6 * 2 * 32 * 8 / 2**30)
    with pytest.raises(ChunkOverflowError, match="cache has 2"):
        small.add_request(0, "x" * 20, 5)
    engine.add_request(0, "hello")
    with pytest.raises(RequestError, match="request 0 is unfinished"):
        engine.add_request(0, "hello")
    engine.reset()
    assert not engine.has_unfinished_requests()
    assert issubclass(ActiveRequestCountOverflowError, ContextOverflowError)
    assert "3 requests are active" in str(ActiveRequestCountOverflowError(2, 3))


def test_a_wrapper_with_batches_of_its_own_is_refused() -> None:
    class Own(GPTInferenceWrapper):
        def get_batch_for_context_window(self, *args: Any) -> dict[str, Any]:
            return {}

    controller = scripts.controller_of(scripts.model_of(1, {}))
    wrapper = controller.inference_wrapped_model
    controller.inference_wrapped_model = Own(wrapper.model, wrapper.inference_wrapper_config)
    with pytest.raises(ConfigError, match="Own defines get_batch_for_context_window"):
        StaticInferenceEngine(controller)


def test_a_model_that_shards_sequences_generates_and_trains_as_before() -> None:
    wanted = scripts.trained_between_script(0, 1, {})
    for losses, answers in run_ranks(scripts.trained_between_script, 2, {"tp": 2}):
        assert losses[0] == losses[1]
        assert losses == pytest.approx(wanted[0])
        assert_same(answers, wanted[1])


@pytest.mark.parametrize("shards_sequences", [False, True])
@pytest.mark.parametrize(
    ("world", "sizes"),
    selection.first(
        1, [(4, {"tp": 2, "ep": 4, "etp": 1}), (4, {"tp": 2, "ep": 2}), (2, {"tp": 2})]
    ),
    ids=["tp2 ep4 etp1", "tp2 ep2", "tp2"],
)
def test_experts_and_tensor_parallelism_give_the_answers_of_one_process(
    world: int, sizes: dict[str, int], shards_sequences: bool
) -> None:
    moe = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_token_dispatcher_type": "alltoall"}
    wanted = scripts.static_script(0, 1, {}, True, moe)
    changes = {**moe, "sequence_parallel": shards_sequences}
    for found in run_ranks(scripts.static_script, world, sizes, True, changes):
        assert_same(found, wanted)


def test_experts_are_not_trained_with_tensor_parallelism_alone() -> None:
    for message in run_ranks(scripts.experts_in_training_script, 2):
        assert "experts with tensor parallelism are trained with --sequence-parallel" in message


def test_arguments_without_effect_are_announced_once(caplog: pytest.LogCaptureFixture) -> None:
    log_once.warn_once.cache_clear()
    for _ in range(2):
        scripts.controller_of(scripts.model_of(1, {}), nccl_all_reduce_for_prefill=True)
        scripts.context_of(materialize_only_last_token_logits=False)
    assert [r.message.split(" has no effect")[0] for r in caplog.records] == [
        "InferenceWrapperConfig: nccl_all_reduce_for_prefill",
        "DynamicInferenceContext: materialize_only_last_token_logits=False",
    ]


def test_a_script_can_run_forward_passes_by_itself() -> None:
    wanted = Letters().tokenize("hello") + by_hand("hello", 3)[0]
    assert scripts.own_loop_script(0, 1, {}) == wanted
    assert run_ranks(scripts.own_loop_script, 2, {"tp": 2}) == [wanted, wanted]


def test_a_context_reports_the_sizes_of_its_engine() -> None:
    context = scripts.context_of(buffer_overflow_factor=2.0, num_cuda_graphs=2)
    estimate = int(0.01 * 2**30 / (2 * 8 * 6 * 4 * 8 * LENGTH) * 2)
    assert context.max_requests == estimate
    assert context.max_tokens == 2048
    assert context.cuda_graph_token_counts == [estimate, -(-estimate // 2)]
    assert context.gtd_request_count == int(estimate / 2 * 0.1)
    assert not context.is_decode_only()
    controller = scripts.controller_of(scripts.model_of(1, {}))
    context = scripts.context_of(max_requests_override=3)
    assert context.max_requests == 3
    engine = DynamicInferenceEngine(controller, context, None, False)
    assert context.max_requests == 3
    kinds = []
    engine.add_request(0, "hello", 3)
    while engine.has_unfinished_requests():
        kinds.append(engine.is_decode_only)
        engine.step(GREEDY)
    assert kinds == [False, True, True]


def test_the_steps_of_a_loop_of_its_own_are_those_of_megatron_core() -> None:
    controller = scripts.controller_of(scripts.model_of(1, {}))
    padded = controller.pad_input_prompt_tokens([[5, 6], [7]], 3, 4)
    assert padded.tolist() == [[5, 6, 1, 1], [7, 1, 1, 1], [1, 1, 1, 1]]
    assert len(controller.unpad_input_prompt_tokens(padded, 2)) == 2
    started = torch.tensor([True, True, False])
    done = torch.zeros(3, dtype=torch.bool)
    done, lengths = controller.update_generation_status(
        torch.tensor([[5, 1], [5, 6], [5, 1]]), started, 1, done, torch.zeros(3), 1
    )
    assert done.tolist() == [True, False, False]
    assert lengths.tolist() == [0, 1, 0]
    text, segments = controller.detokenize_generations(
        torch.tensor([50, 51, 1, 0]), torch.tensor(3), True
    )
    assert (text, segments) == ("jk", [["j", "k"]])
    assert controller.tokenize_prompt("a", add_BOS=True)[0] == Letters.bos


def test_sampling_from_logits_draws_from_the_largest() -> None:
    controller = scripts.controller_of(scripts.model_of(1, {}))
    logits = torch.randn(1, VOCAB := 100).expand(2000, -1)
    best = set(logits[0, :64].topk(3).indices.tolist())
    tops: dict[int, list[dict[str, float]]] = {}
    params = SamplingParams(top_k=3, temperature=2.0, top_n_logprobs=2)
    found = controller.sample_from_logits(logits, params, 64, None, tops)
    assert set(found.tolist()) == best
    assert VOCAB > 64
    assert len(tops) == 2000
    assert len(tops[0][0]) == 2


def test_a_scheduler_keeps_requests_in_the_order_of_their_arrival() -> None:
    scheduler = Scheduler(2)
    ids = [scheduler.add_request(prompt=str(i), prompt_tokens=[i]) for i in range(4)]
    assert list(scheduler.active_request_pool) == ids[:2]
    scheduler.active_request_pool[0].status = Status.COMPLETED
    scheduler.update_requests_pools(scheduler.active_request_pool.copy())
    assert list(scheduler.active_request_pool) == [1, 2]
    assert list(scheduler.waiting_request_pool) == [3]
    scheduler.abort_request(3)
    assert scheduler.completed_request_pool[3].status is Status.FAILED
    assert scheduler.num_requests_pending() == 2

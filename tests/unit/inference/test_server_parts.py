"""Parts of the server: messages, the engine's loop, calls of tools, the body of a request."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

pytest.importorskip("starlette")

from megatron.core.config.errors import ConfigError
from megatron.core.inference.paged_engine.request import (
    Beam,
    BeamParams,
    PromptImage,
    Request,
    RequestError,
    RequestOutput,
    TokenOutput,
)
from megatron.core.inference.sampling_params import SamplingParams
from megatron.inference.server import engine_link
from megatron.inference.server.control_api import (
    CONTROL,
    RUNTIME_ADAPTERS,
    answer_load_adapter,
    answer_pause,
    answer_resume,
    answer_unload_adapter,
)
from megatron.inference.server.engine_link import (
    EngineClient,
    EngineDied,
    EngineInfo,
    EngineLoop,
)
from megatron.inference.server.fields import ApiError, Fields, as_api_error, parse_json
from megatron.inference.server.front_end import watch_engine
from megatron.inference.server.generation import Generation, GenerationRequest, Metrics
from megatron.inference.server.megatron_api import answer_api
from megatron.inference.server.model import Model
from megatron.inference.server.openai_api import CompletionRequest, log_prob_table
from megatron.inference.server.openai_fields import read_tools
from megatron.inference.text import TextDelta, TextRules
from megatron.training.tokenizer import TokenizerSpec
from tests.support.fake_engine import FakeEngine

INFO = EngineInfo("m", {"tokenizer_type": "NullTokenizer"}, 100, 50, 0, modules=("a",))
PARAMS = SamplingParams(
    temperature=0.5,
    logit_bias={3: -1.5},
    stop_token_ids=(1, 2),
    forbidden_after=((3,), (4, 5)),
    num_tokens_to_generate=2,
)
REQUEST = Request(
    "r1", [5, 6], PARAMS, source=[7], grammar=("regex", "a+"), fork_of="r0", beam=BeamParams(3)
)


def test_a_request_is_the_same_on_the_other_side():
    line = engine_link.encode("add", request=engine_link.request_to_json(REQUEST))
    found = engine_link.request_from_json(json.loads(line)["request"])
    assert vars(found) == vars(REQUEST)


def test_images_are_the_same_on_the_other_side():
    pixels = np.random.default_rng(1).standard_normal((2, 3, 4, 5)).astype(np.float32)
    image = PromptImage(pixels, 6, (1, 2, 30, 20))
    request = Request("r1", [5, *image.ids], PARAMS, images=(image,))
    line = engine_link.encode("add", request=engine_link.request_to_json(request))
    found = engine_link.request_from_json(json.loads(line)["request"])
    assert found.prompt == request.prompt == [5, *found.images[0].ids]
    assert found.images[0].pixels.tobytes() == pixels.tobytes()
    assert found.images[0].size == (1, 2, 30, 20)


def test_an_output_is_the_same_on_the_other_side():
    token = TokenOutput(3, -0.5, ((3, -0.5), (4, -1.0)))
    beam = Beam((token,), -0.25, "stop")
    for output in (
        RequestOutput("a", (token,), (token, token), "stop", 5, 2, "why", (beam,)),
        RequestOutput("b"),
    ):
        line = engine_link.encode("output", item=output)
        assert RequestOutput.from_json(json.loads(line)["item"]) == output


def _run(lines: list[bytes], part: int = 1 << 20) -> tuple[list[dict], FakeEngine]:
    """Give a loop some messages and the end of the socket; return what it sends."""
    ours, its = socket.socketpair()
    engine = FakeEngine(INFO)
    with ours, its:
        ours.sendall(b"".join(lines))
        ours.shutdown(socket.SHUT_WR)
        with mock.patch.object(engine_link, "_READ_BYTES", part):
            EngineLoop(engine, its, INFO).run()
        its.shutdown(socket.SHUT_WR)
        received = b"".join(iter(lambda: ours.recv(1 << 16), b""))
    return [json.loads(line) for line in received.splitlines()], engine


@pytest.mark.parametrize("part", [1, 7, 1000])
def test_the_loop_answers_each_message(part):
    plain = Request("r1", [5, 6], replace(PARAMS, num_tokens_to_generate=99, ignore_eos=True))
    found, engine = _run(
        [
            engine_link.encode("ping", call=1),
            engine_link.encode("add", request=engine_link.request_to_json(plain)),
            engine_link.encode("abort", id="unknown"),
            engine_link.encode("stats", call=2),
        ],
        part,
    )
    answers = [m for m in found if m["type"] != "output"]
    assert sorted(m["type"] for m in answers) == ["accepted", "answer", "answer", "hello"]
    assert [m["call"] for m in answers if m["type"] == "answer"] == [1, 2]
    assert "num_running" in next(m for m in answers if m.get("call") == 2)
    assert not engine.open  # the front end has ended


def test_a_request_waits_for_its_grammar_while_others_are_added(monkeypatch):
    questions = []

    def prepare(engine, request: Request) -> bool:
        questions.append(request.request_id)
        return request.grammar is None or "r1" in questions

    monkeypatch.setattr(FakeEngine, "prepare", prepare)
    slow = Request("slow", [5], PARAMS, grammar=("regex", "a+"))
    lost = Request("lost", [5], PARAMS, grammar=("regex", "b+"))
    found, engine = _run(
        [
            *(
                engine_link.encode("add", request=engine_link.request_to_json(r))
                for r in (slow, lost)
            ),
            engine_link.encode("abort", id="lost"),
            engine_link.encode(
                "add", request=engine_link.request_to_json(Request("r1", [5], PARAMS))
            ),
            *(engine_link.encode("ping", call=i) for i in range(9)),
        ],
        part=64,
    )
    assert [m["id"] for m in found if m["type"] == "accepted"] == ["r1", "slow"]
    assert engine.num_added == 2


@pytest.mark.parametrize("keeps_tokens", [False, True])
def test_tokens_are_kept_for_answers_that_have_them(keeps_tokens):
    spec = vars(TokenizerSpec(tokenizer_type="NullTokenizer", vocab_size=99))
    wanted = GenerationRequest([[5, 6]], PARAMS, TextRules(), keeps_tokens=keeps_tokens)

    async def finish():
        client = EngineClient(None, SimpleNamespace(write=sent.append, drain=nothing))
        model = Model.of(replace(INFO, tokenizer=spec))
        generation = Generation(client, model, Metrics(), wanted)
        (request_id,) = generation.samples
        output = RequestOutput(
            request_id, (TokenOutput(7, -1.0), TokenOutput(8, -2.0)), (), "length"
        )
        begun = asyncio.create_task(generation.start())
        await asyncio.sleep(0)
        client._dispatch({"type": "output", "id": request_id, "item": output})
        client._dispatch({"type": "accepted", "id": request_id})
        await begun
        async for _ in generation.deltas():
            pass
        assert not client.calls
        return generation.samples[request_id]

    async def nothing():
        pass

    sent = []
    sample = asyncio.run(finish())
    assert (sample.text, sample.state.num_tokens, sample.mean_log_prob) == (" 7 8", 2, -1.5)
    assert len(sample.tokens) == (2 if keeps_tokens else 0)
    assert [json.loads(line)["type"] for line in sent] == ["add"]


def test_values_of_an_answer_are_counted():
    params = replace(PARAMS, num_tokens_to_generate=3)
    prompts = [[5, 6], [7]]

    def count(params, **more):
        return GenerationRequest(prompts, params, TextRules(), **more).num_values

    scored = replace(params, return_log_probs=True)
    assert count(params, num_samples=9) == 0
    assert count(scored, num_samples=9) == 9 * 2 * 3
    top = replace(scored, top_n_logprobs=4)
    assert count(top) == 2 * 3 * 5
    assert count(replace(top, return_prompt_log_probs=True)) == 2 * 3 * 5 + 3
    every = {"return_prompt_log_probs": True, "return_prompt_top_n_logprobs": True}
    assert count(replace(top, **every)) == 2 * 3 * 5 + 3 * 5
    assert GenerationRequest([[5, 6]], params, TextRules(), beam=BeamParams(4)).num_values == 4 * (
        2 + 3
    )


def test_a_request_whose_samples_have_many_prompt_tokens_is_refused():
    model = SimpleNamespace(info=replace(INFO, max_sequence_length=5000))
    wanted = GenerationRequest([[5] * 4096] * 64, PARAMS, TextRules(), num_samples=65)
    with pytest.raises(ApiError, match="17039360 tokens of prompts, at most 16777216") as error:
        Generation(None, model, None, wanted)
    assert error.value.param == "prompt"


def test_a_failed_update_keeps_the_engine(monkeypatch):
    def update(engine, load: str) -> int:
        if load == "bad":
            raise ConfigError("bad weights")
        return 3

    monkeypatch.setattr(FakeEngine, "update_weights", update, raising=False)
    lines = [
        engine_link.encode("update_weights", call=i, load=w) for i, w in enumerate(["bad", "x"])
    ]
    found, _ = _run(lines)
    assert found[1:] == [
        {"type": "answer", "call": 0, "error": "bad weights"},
        {"type": "answer", "call": 1, "version": 3},
    ]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[" * 101 + "]" * 101, "100 levels"),
        ("[" * 100 + "]" * 100, None),
        ('{"a":' * 101 + "1" + "}" * 101, "100 levels"),
        (json.dumps({"a": ["[" * 200, '"[' * 200, "\\[" * 200, '\\"{' * 200]}), None),
        (json.dumps([[]] * 70_000), "more than 65536"),
        (json.dumps(["[]" * 70_000]), None),
        (json.dumps(dict.fromkeys(range(140_000))), "more than 131072 fields"),
        (json.dumps([":" * 140_000]), None),
        (json.dumps({"a": "\ud800"}), "half of a surrogate"),
        (json.dumps({"a": "\udc00\ud800"}), "half of a surrogate"),
        (json.dumps(["\ud800"]), "half of a surrogate"),
        (json.dumps({"a": "\U0001f600 \\ud800"}), None),
    ],
)
def test_a_json_text_is_refused_for_what_later_code_cannot_handle(text, reason):
    if reason is None:
        assert parse_json(text.encode(), "it") == json.loads(text)
        return
    with pytest.raises(ApiError, match=reason):
        parse_json(text.encode(), "it")


class _SlowRequest:
    headers: dict[str, str] = {}

    async def receive(self) -> dict[str, object]:
        await asyncio.Event().wait()
        raise AssertionError("nothing arrives")


def test_a_body_that_does_not_arrive_is_given_up(monkeypatch):
    from megatron.inference.server import http
    from megatron.inference.server.fields import ApiError

    monkeypatch.setattr(http, "_BODY_TIMEOUT_S", 0.01)
    with pytest.raises(ApiError, match="did not arrive") as error:
        asyncio.run(http.read_json(_SlowRequest(), 100))
    assert error.value.status == 408


def test_a_template_is_found_in_the_folder_of_the_tokenizer(tmp_path: Path):
    from megatron.core.chat_templates import read_chat_template

    folder = str(tmp_path)
    assert read_chat_template(None, None) == (None, {})
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": None}
    named = [{"name": "default", "template": "A"}, {"name": "rag", "template": "B"}]
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({**config, "chat_template": named}))
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    assert read_chat_template(None, folder) == ("A", tokens)
    (tmp_path / "chat_template.jinja").write_text("C")
    assert read_chat_template(None, str(tmp_path / "tokenizer.json")) == ("C", tokens)
    own = tmp_path / "own"
    own.write_text("D")
    assert read_chat_template(str(own), folder) == ("D", tokens)
    with pytest.raises(ConfigError, match="--chat-template"):
        read_chat_template(str(tmp_path / "none"), folder)
    path.write_text("{")
    with pytest.raises(ConfigError, match="no JSON"):
        read_chat_template(None, folder)


def test_the_text_of_a_beam_keeps_the_space_after_the_prompt():
    model = Model.of(
        replace(INFO, tokenizer=vars(TokenizerSpec(tokenizer_type="NullTokenizer", vocab_size=99)))
    )
    beam = Beam((TokenOutput(7, -1.0), TokenOutput(8, -1.0)), -2.0, "length")

    class Searched:
        max_api_tokens = 100

        def __init__(self):
            self.model = model

        async def samples(self, wanted, request):
            return [SimpleNamespace(prompt=wanted.prompts[0], beams=(beam,))]

    body = {"prompts": ["5 6"], "tokens_to_generate": 2, "beam_width": 2}
    answer = asyncio.run(answer_api(Searched(), None, body))
    assert json.loads(answer.body)["text"] == ["5 6 7 8"]


def test_fields_of_put_api_become_parameters_of_the_engine():
    pieces = ["a", ":", "\n", "b:", "\n\n", ":c", " \n"]
    tokenizer = SimpleNamespace(
        vocab=dict.fromkeys(pieces),
        vocab_size=len(pieces),
        detokenize=lambda ids: "".join(pieces[i] for i in ids),
        tokenize=lambda text: [0],
        id_of=lambda role: None,
    )
    asked = []

    class Listening:
        max_api_tokens = 100
        model = Model(INFO, tokenizer)

        async def samples(self, wanted, request):
            asked.append(wanted)
            raise ApiError("heard")

    decay = {"top_p": 0.9, "top_p_decay": 0.5, "top_p_bound": 0.2}
    for more in ({}, {**decay, "prevent_newline_after_colon": True}):
        with pytest.raises(ApiError, match="heard"):
            asyncio.run(answer_api(Listening(), None, {"prompts": ["a"], **more}))
    plain, changed = (wanted.params for wanted in asked)
    assert (plain.top_p_decay, plain.forbidden_after) == (0, ((), ()))
    assert (changed.top_p, changed.top_p_decay, changed.top_p_bound) == (0.9, 0.5, 0.2)
    assert changed.forbidden_after == ((1, 3), (2, 4))


def test_what_the_engine_refuses_is_a_message_of_megatron_too():
    class Refusing:
        max_api_tokens = 100
        model = Model.of(
            replace(
                INFO, tokenizer=vars(TokenizerSpec(tokenizer_type="NullTokenizer", vocab_size=99))
            )
        )

        async def samples(self, wanted, request):
            raise RequestError("length_penalty 100: give a number from -10 to 10")

    body = {"prompts": ["5"], "beam_width": 2, "length_penalty": 100}
    with pytest.raises(RequestError) as refused:
        asyncio.run(answer_api(Refusing(), None, body))
    error = as_api_error(refused.value)
    message = "length_penalty 100: give a number from -10 to 10"
    assert (error.status, error.body["message"]) == (400, message)


def test_an_adapter_that_was_unloaded_meanwhile_is_not_found():
    error = as_api_error(RequestError("the adapter 'sql' is not loaded", "model"))
    assert (error.status, error.param, error.code) == (404, "model", "model_not_found")


def test_a_likelier_token_of_the_same_text_stays_in_the_table():
    """lm-eval calls a token greedy if its value is the greatest of its top ones."""
    tokenizer = SimpleNamespace(vocab_size=9, detokenize=lambda ids: "\ufffd" * len(ids))
    score = TokenOutput(3, -2.0, ((4, -1.0),))
    table = log_prob_table(Model(INFO, tokenizer), [(3, score, 0)], 1)
    assert table["token_logprobs"] == [-2.0]
    assert table["top_logprobs"] == [{"\ufffd": -1.0}]


def test_a_stream_sends_prompt_log_probs_before_the_first_text():
    asked = CompletionRequest.__new__(CompletionRequest)
    asked.model = SimpleNamespace(token_text=str)
    asked.begun = set()
    asked.has_echo = False
    asked.num_log_probs = None
    asked.num_prompt_log_probs = 0
    score = TokenOutput(3, -2.0, ())
    sample = SimpleNamespace(index=0, prompt_scores=[score], weight_version=0)
    # The first token is a part of a character, so its text is empty.
    (first,) = asked.chunks(sample, TextDelta("", (), None, None))
    assert first["prompt_logprobs"][1]["3"]["logprob"] == -2.0
    assert asked.chunks(sample, TextDelta("", (), None, None)) == []


@pytest.mark.parametrize("choice", ["function", "", "other", {}, {"function": {"name": "b"}}, [1]])
def test_a_choice_of_tools_that_is_none_is_refused(choice):
    tool = {"type": "function", "function": {"name": "a"}}
    with pytest.raises(ApiError, match="tool_choice: .* is invalid"):
        read_tools(Fields({"tools": [tool], "tool_choice": choice}), Model(INFO, None))


def test_an_error_shows_the_beginning_of_a_long_value():
    class Item:
        num_shown = 0

        def __repr__(self):
            Item.num_shown += 1
            return "item"

    message = str(Fields({"stop": [Item()] * 1000}).fail("stop", "give a string"))
    assert message == "stop: [item, item, item, item, item, item, ...] is invalid: give a string"
    assert Item.num_shown < 10, "the repr of all items would hold up the event loop"


def test_an_engine_that_does_not_answer_is_named(caplog):
    class Stopped:
        calls = ("a request",)
        failure = None
        num_asked = 0

        async def ask(self, kind, timeout_s):
            self.num_asked += 1
            if self.num_asked > 1:
                raise EngineDied("the engine's process has ended")
            raise TimeoutError

    asyncio.run(watch_engine(Stopped(), 0.0))
    assert f"rank 0 (process {os.getppid()}), which holds the engine, has not" in caplog.text


class OrderedEngine:
    """Answers in the order in which it was asked, when ``answer_all`` is called."""

    def __init__(self) -> None:
        self.refuses_requests = False
        self._waiting: list[asyncio.Future[dict[str, object]]] = []

    async def ask(self, kind: str, timeout_s: float, **content: object) -> dict[str, object]:
        self._waiting.append(asyncio.get_running_loop().create_future())
        return await self._waiting[-1]

    def answer_all(self) -> None:
        for answer in self._waiting:
            answer.set_result({})


def test_the_front_end_agrees_with_an_engine_that_two_clients_control_at_once() -> None:
    features = (CONTROL, RUNTIME_ADAPTERS)
    info = SimpleNamespace(model="m", features=features)
    request = SimpleNamespace(query_params={})

    async def both(first, second, *bodies) -> SimpleNamespace:
        engine = OrderedEngine()
        service = SimpleNamespace(
            client=engine, model=SimpleNamespace(info=info), adapters={"a": "old"}
        )
        tasks = [
            asyncio.ensure_future(call(service, request, body))
            for call, body in zip((first, second), bodies, strict=True)
        ]
        await asyncio.sleep(0)
        engine.answer_all()
        await asyncio.gather(*tasks)
        return service

    load = {"lora_name": "a", "lora_path": "new", "load_inplace": True}
    unload = {"lora_name": "a"}
    found = asyncio.run(both(answer_load_adapter, answer_unload_adapter, load, unload))
    assert found.adapters == {}
    found = asyncio.run(both(answer_unload_adapter, answer_load_adapter, unload, load))
    assert found.adapters == {"a": "new"}
    assert asyncio.run(both(answer_resume, answer_pause, {}, {})).client.refuses_requests
    assert not asyncio.run(both(answer_pause, answer_resume, {}, {})).client.refuses_requests

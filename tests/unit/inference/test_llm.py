"""Generation from Python: texts, stop strings, streams, and prompts that cannot be served."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from megatron.core.config.errors import ConfigError
from megatron.core.inference.paged_engine.options import EngineOptions
from megatron.core.inference.paged_engine.request import RequestError
from megatron.core.inference.sampling_params import SamplingParams
from megatron.inference.llm import LLM
from megatron.training.tokenizer import TokenizerSpec, create_tokenizer
from tests.support.ranks import run_ranks
from tests.unit.inference.test_engine import LENGTH, engine

PARAMS = SamplingParams(temperature=0.0, num_tokens_to_generate=8, return_log_probs=True)
PROMPTS = ["5 7 9", "11", "3 4 5 6 7 8 9 10"]


def llm(world: int = 1, sizes: dict[str, int] | None = None) -> LLM:
    tokenizer = create_tokenizer(TokenizerSpec(tokenizer_type="NullTokenizer", vocab_size=62))
    return LLM(engine(EngineOptions(page_size=4), world, sizes or {}), tokenizer)


def texts(rank: int, world: int, sizes: dict[str, int]) -> list[str]:
    model = llm(world, sizes)
    first = [answer.text for answer in model.generate(PROMPTS, PARAMS)]
    second = [answer.text for answer in model.answers(iter(PROMPTS), PARAMS)]
    assert first == second
    assert "".join(model.stream(PROMPTS[0], PARAMS)) == "".join(first[:1])
    return first


@pytest.mark.feature("Generation: LLM.load(path).generate(prompts) from Python, on any ranks")
def test_rank_0_gets_the_texts_of_one_process() -> None:
    alone = texts(0, 1, {})
    assert len({*alone}) == 3
    assert run_ranks(texts, 2, {"pp": 2}) == [alone, []]


def test_texts_and_ids_are_prompts() -> None:
    model = llm()
    (text,) = model.generate("5 7 9", PARAMS)
    (ids,) = model.generate([5, 7, 9], PARAMS)
    many = model.generate([[5, 7, 9], "5 7 9"], PARAMS)
    assert {answer.text for answer in (text, ids, *many)} == {text.text}
    assert [t.token for t in text.tokens] == [int(word) for word in text.text.split()]
    assert text.finish_reason == "length"
    assert all(t.log_prob < 0 for t in text.tokens)


@pytest.mark.feature("Generation: LLM.chat answers conversations by the chat template")
def test_a_chat_is_answered_by_its_template() -> None:
    pytest.importorskip("jinja2")
    model = llm()
    template = (
        "{% for m in messages %}{{ m.content ~ ' ' }}{% endfor %}{{ tools | count ~ ' ' ~ more }}"
        "{{ ' 11' if add_generation_prompt }}"
    )
    options = {"chat_template": template, "tools": [{}, {}], "chat_template_kwargs": {"more": 9}}
    chats = [[{"role": "user", "content": "5 7"}], [{"role": "user", "content": "8"}]]
    wanted = [answer.text for answer in model.generate(["5 7 2 9 11", "8 2 9 11"], PARAMS)]
    assert [answer.text for answer in model.chat(chats, PARAMS, **options)] == wanted
    assert [answer.text for answer in model.chat(chats[0], PARAMS, **options)] == wanted[:1]
    assert model.chat([], PARAMS, **options) == []
    (opened,) = model.chat(chats[1], PARAMS, continue_final_message=True, **options)
    assert opened.text == model.generate("8", PARAMS)[0].text
    with pytest.raises(ConfigError, match="no chat template"):
        model.chat(chats, PARAMS)


def test_a_text_ends_before_a_stop_string() -> None:
    model = llm()
    (whole,) = model.generate("5 7 9", PARAMS)
    words = whole.text.split(" ")
    stop = " ".join(words[3:5])
    (cut,) = model.generate("5 7 9", PARAMS, stop=["never", stop])
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.finish_reason == "stop"
    assert not model.engine.has_unfinished


def test_a_prompt_that_is_too_long_leaves_nothing_behind() -> None:
    model = llm()
    with pytest.raises(RequestError, match=str(LENGTH)):
        model.generate(["5 7", [1] * (LENGTH + 1)], PARAMS)
    stats = model.engine.stats()
    assert (stats.num_waiting, stats.num_free_pages) == (0, stats.num_pages)
    assert model.generate("5 7 9", PARAMS)[0].text


def test_a_stream_that_is_left_early_frees_its_pages() -> None:
    model = llm()
    for _ in model.stream("5 7 9", PARAMS):
        break
    assert model.engine.stats().num_free_pages == model.engine.stats().num_pages


def test_ids_of_other_libraries_are_prompts() -> None:
    model = llm()
    wanted = model.generate([5, 7, 9], PARAMS)[0].text
    of_others: list[Any] = [np.array([5, 7, 9]), torch.tensor([5, 7, 9]), (5, 7, 9)]
    for prompt in of_others:
        assert [a.text for a in model.generate(prompt, PARAMS)] == [wanted]
        assert [a.text for a in model.generate([prompt, prompt], PARAMS)] == [wanted] * 2


def test_an_empty_text_is_refused_and_no_prompts_have_no_answers() -> None:
    model = llm()
    with pytest.raises(RequestError, match="prompt has no tokens"):
        model.generate("", PARAMS)
    assert model.generate([], PARAMS) == []


@pytest.mark.parametrize("prompt", [[None], [1.5], [["5"]]])
def test_what_is_no_prompt_is_refused(prompt: Any) -> None:
    with pytest.raises(RequestError, match="give a text or a list of token ids"):
        llm().generate(prompt, PARAMS)


def test_one_stop_string_needs_no_list() -> None:
    model = llm()
    (whole,) = model.generate("5 7 9", PARAMS)
    stop = whole.text[4:8]
    assert (
        model.generate("5 7 9", PARAMS, stop=stop)[0].text == whole.text[: whole.text.index(stop)]
    )
    with pytest.raises(RequestError, match="an empty string ends every text"):
        model.generate("5 7 9", PARAMS, stop=[""])

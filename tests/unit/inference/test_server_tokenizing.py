"""Long texts of requests: limits on characters, and tokenizing in another process."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest

pytest.importorskip("starlette")

from megatron.inference.server.engine_link import EngineInfo
from megatron.inference.server.fields import ApiError, Fields
from megatron.inference.server.model import LimitedTokenizer, Model
from megatron.inference.server.openai_api import read_prompts
from megatron.training.tokenizer import TokenizerSpec

SPEC = vars(TokenizerSpec(tokenizer_type="NullTokenizer", vocab_size=99))
INFO = EngineInfo("m", SPEC, vocab_size=100, max_sequence_length=5000, eod=99)
LONG = [7] * 4000
MODULE = """
import os
import signal

from megatron.training.tokenizer import register_tokenizer
from megatron.training.tokenizer.base import _NullTokenizer

class Slow(_NullTokenizer):
    def tokenize(self, text):
        if text.startswith("forever"):
            os.kill(os.getpid(), signal.SIGPROF)  # as its timer does
        return super().tokenize(text)

register_tokenizer("SlowTokenizer", lambda spec: Slow(99))
"""


class Unusable(SimpleNamespace):
    def tokenize(self, text):
        raise AssertionError("this process tokenizes")

    detokenize = tokenize


@pytest.fixture
def model():
    """A model whose tokenizer in this process reads nothing."""
    found = Model.of(INFO)
    found = Model(INFO, Unusable(vocab=found.tokenizer.vocab, vocab_size=100))
    yield found
    found.close()


def text_of(ids):
    return " ".join(map(str, ids))


def test_another_process_tokenizes_and_decodes_long_texts(model):
    assert asyncio.run(model.tokenize([text_of(LONG), "5 6"])) == [LONG, [5, 6]]
    assert asyncio.run(model.decode_all([LONG, [5]])) == [text_of(LONG), "5"]


def test_this_process_tokenizes_short_texts():
    info = replace(INFO, tokenizer={"tokenizer_type": "unknown to another process"})
    model = Model(info, Model.of(INFO).tokenizer)
    assert asyncio.run(model.tokenize(["5 6", "7"])) == [[5, 6], [7]]
    assert asyncio.run(model.decode_all([[5, 6], [7]])) == ["5 6", "7"]


def test_a_prompt_does_not_wait_for_documents(model, monkeypatch):
    is_over = threading.Event()
    document = "1 " * model.most_characters
    apply = LimitedTokenizer.apply

    def wait_with_documents(self, kind, items):
        if sum(map(len, items)) >= model.most_characters:
            assert is_over.wait(60)
        return apply(self, kind, items)

    monkeypatch.setattr(LimitedTokenizer, "apply", wait_with_documents)

    async def prompt_beside_documents():
        waiting = [asyncio.create_task(model.tokenize([document])) for _ in range(8)]
        await asyncio.sleep(0)  # they begin
        ids = await asyncio.wait_for(model.tokenize([text_of(LONG)]), 60)
        is_over.set()
        return ids, [len(ids) for (ids,) in await asyncio.gather(*waiting)]

    ids, lengths = asyncio.run(prompt_beside_documents())
    assert ids == [LONG]
    assert lengths == [model.most_characters] * 8


def test_a_long_text_that_the_tokenizer_cannot_read_is_refused(model):
    with pytest.raises(ApiError, match="cannot read it: .*reads ids in decimal"):
        asyncio.run(model.tokenize([text_of(LONG) + " x"]))
    assert asyncio.run(model.tokenize([text_of(LONG)])) == [LONG]


def test_a_text_that_takes_too_long_is_given_up(tmp_path, monkeypatch):
    (tmp_path / "slow_tokenizer.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    info = replace(
        INFO,
        tokenizer=vars(TokenizerSpec(tokenizer_type="SlowTokenizer")),
        modules=("slow_tokenizer",),
    )
    model = Model(info, Model.of(INFO).tokenizer)
    with pytest.raises(ApiError, match="more than 10 s"):
        asyncio.run(model.tokenize(["forever" + " " * 4000]))
    assert asyncio.run(model.tokenize([text_of(LONG)])) == [LONG]
    model.close()


def test_a_text_is_refused_by_its_characters_before_anything_is_tokenized(model):
    longest = max(map(len, model.tokenizer.vocab)) + 1
    model.check_characters("5" * 5000 * longest, "prompt")
    for prompt in ("5" * (5000 * longest + 1), ["5", "5" * (5000 * longest + 1)]):
        with pytest.raises(ApiError, match="maximum context length") as error:
            asyncio.run(read_prompts(Fields({"prompt": prompt}), model, has_texts=False))
        assert error.value.code == "context_length_exceeded"


def test_lists_of_ids_are_refused_by_their_length_before_anything_is_tokenized(model):
    for prompt in ([[5] * 5001], ["5", [5] * 5001], [5] * 5001, [[5]] * 2049, [[5], [100]]):
        with pytest.raises(ApiError, match="prompt: "):
            asyncio.run(read_prompts(Fields({"prompt": prompt}), model, has_texts=False))


def test_ids_are_decoded_for_a_request_that_echoes_its_prompt_only(model):
    fields = Fields({"prompt": [LONG, [5]]})
    assert asyncio.run(read_prompts(fields, model, has_texts=False)) == ([LONG, [5]], [])
    texts = [text_of(LONG), "5"]
    assert asyncio.run(read_prompts(fields, model, has_texts=True)) == ([LONG, [5]], texts)

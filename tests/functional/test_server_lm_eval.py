"""The requests of lm-eval's model local-completions, and what it reads of the answers.

Their form is that of lm-eval 0.4.13; test_lm_eval.py runs lm-eval itself where it is installed.
"""

from __future__ import annotations

import pytest

from tests.support.server_process import EOD, fake_server


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    template = tmp_path_factory.mktemp("template") / "template.jinja"
    template.write_text("{{ messages[-1].content }}")
    folder = tmp_path_factory.mktemp("server")
    with fake_server(folder, "--chat-template", str(template)) as found:
        yield found


def ids_of(server, text: str) -> list[int]:
    """Tokenize as lm-eval does with tokenizer_backend=remote."""
    body = {"prompt": text, "add_special_tokens": False}
    status, found = server.ask("POST", "/tokenize", body)
    assert status == 200, found
    return found["tokens"]


def scores(server, prompts: list[list[int]]) -> list[dict[str, list]]:
    """Ask for a loglikelihood; return the table of each prompt."""
    scoring = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    body = {"model": "fake", "prompt": prompts, **scoring}
    # lm-eval sends a key, empty if there is none.
    status, found = server.ask("POST", "/v1/completions", body, {"Authorization": "Bearer "})
    assert status == 200, found
    assert [choice["index"] for choice in found["choices"]] == list(range(len(prompts)))
    return [choice["logprobs"] for choice in found["choices"]]


@pytest.mark.feature("Serving: a client can tokenize by the server, as lm-eval does")
def test_the_tokenizer_is_found_and_used(server):
    status, info = server.ask("GET", "/tokenizer_info")
    assert status == 200
    assert info["eos_token"] == "<|endoftext|>"
    assert info["bos_token"] is None
    assert info["chat_template"] == "{{ messages[-1].content }}"
    assert ids_of(server, info["eos_token"]) == [EOD]
    ids = ids_of(server, "Hello \U0001f600")
    assert server.ask("POST", "/detokenize", {"tokens": ids}) == (
        200,
        {"prompt": "Hello \U0001f600"},
    )


def test_a_loglikelihood_has_a_score_for_each_token_and_one_more(server):
    prompts = [ids_of(server, "Hello world"), [40, 413, 79, 12]]
    for prompt, table in zip(prompts, scores(server, prompts), strict=True):
        # lm-eval reads [length of the context : -1] of both columns.
        assert len(table["token_logprobs"]) == len(table["top_logprobs"]) == len(prompt) + 1
        assert table["token_logprobs"][:-1] == [None] + [-1.0] * (len(prompt) - 1)
        assert all(max(top.values()) == 0.0 for top in table["top_logprobs"][1:])


def test_a_generation_ends_before_its_stop_strings(server):
    body = {"prompt": [ids_of(server, "Hello world"), ids_of(server, "abc")], "model": "fake"}
    body |= {"max_tokens": 40, "temperature": 0, "stop": ["w", "\n\n", "<|endoftext|>"]}
    status, found = server.ask("POST", "/v1/completions", {**body, "seed": 1234})
    assert status == 200, found
    assert {c["index"]: c["text"] for c in found["choices"]} == {0: "Hello ", 1: "abc"}

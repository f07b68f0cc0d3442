"""PUT /api, the protocol of Megatron-LM's server, and clients written for it."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from unittest import mock

import pytest

from tests.support.server_process import fake_server
from tools import text_generation_cli


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with fake_server(tmp_path_factory.mktemp("server")) as found:
        yield found


def put(server, **fields):
    return server.ask("PUT", "/api", fields)


@pytest.mark.feature("Serving: clients of Megatron-LM's server get its fields and its errors")
def test_the_answer_has_text_segments_and_log_probs(server):
    status, found = put(server, prompts=["Hello", "ab"], tokens_to_generate=20, logprobs=True)
    assert status == 200
    assert found["text"] == ["HelloHello", "abab"]
    assert found["segments"][0] == ["H", "ell", "o", "H", "ell", "o"]
    assert found["tokens"][0] == [40, 413, 79, 40, 413, 79]
    assert found["logprobs"][0] == [-1.0, -1.0, -0.25, -0.5, -0.75]


def test_without_logprobs_there_are_none(server):
    assert put(server, prompts=["Hello"], tokens_to_generate=2)[1]["logprobs"] is None


def test_no_tokens_are_generated_for_scoring(server):
    status, found = put(server, prompts=["Hello"], tokens_to_generate=0, logprobs=True)
    assert (status, found["text"], found["logprobs"]) == (200, ["Hello"], [[-1.0, -1.0]])


def test_a_line_end_stops_a_text_and_stays(server):
    fields = {"prompts": ["a\nb\n\nc"], "tokens_to_generate": 50}
    assert put(server, **fields, stop_on_eol=True)[1]["text"] == ["a\nb\n\nca\n"]
    assert put(server, **fields, stop_on_double_eol=True)[1]["text"] == ["a\nb\n\nca\nb\n\n"]


def test_bos_makes_empty_prompts_possible(server):
    status, found = put(server, prompts=[""], tokens_to_generate=1, add_BOS=True)
    assert (status, found["tokens"][0][0]) == (200, 0)


def test_fields_of_sampling_are_accepted(server):
    fields = {"temperature": 0.5, "top_k": 3, "random_seed": 5, "no_log": True}
    assert put(server, prompts=["ab"], tokens_to_generate=4, **fields)[0] == 200
    decay = {"top_p": 0.9, "top_p_decay": 0.5, "top_p_bound": 0.2}
    assert put(server, prompts=["ab"], tokens_to_generate=4, **decay)[0] == 200


K = "equal to or greater than 0 and less than or equal to 1000"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "prompts argument required"),
        ({"prompts": "a"}, "prompts is not a list of strings"),
        ({"prompts": [5]}, "prompts is not a list of strings"),
        ({"prompts": []}, "prompts is empty"),
        ({"prompts": ["a"] * 129}, "Maximum number of prompts is 128"),
        (
            {"prompts": ["a"], "max_len": 5},
            "max_len is no longer used.  Replace with tokens_to_generate",
        ),
        (
            {"prompts": ["a"], "sentences": ["b"]},
            "sentences is no longer used.  Replace with prompts",
        ),
        (
            {"prompts": ["a"], "tokens_to_generate": "5"},
            "tokens_to_generate must be an integer greater than 0",
        ),
        (
            {"prompts": ["a"], "tokens_to_generate": -1},
            "tokens_to_generate must be an integer greater than or equal to 0",
        ),
        ({"prompts": ["a"], "logprobs": 1}, "logprobs must be a boolean value"),
        (
            {"prompts": ["a"], "tokens_to_generate": 0},
            "tokens_to_generate=0 implies logprobs should be True",
        ),
        (
            {"prompts": ["a"], "temperature": 0},
            "temperature must be a positive number less than or equal to 100.0",
        ),
        ({"prompts": ["a"], "top_k": 0.5}, f"top_k must be an integer {K}"),
        ({"prompts": ["a"], "top_k": 1001}, f"top_k must be {K}"),
        (
            {"prompts": ["a"], "top_p": "x"},
            "top_p must be a positive float less than or equal to 1.0",
        ),
        (
            {"prompts": ["a"], "top_p": 0.5, "top_k": 5},
            "cannot set both top-k and top-p samplings.",
        ),
        ({"prompts": ["a"], "top_p": 1.5}, "top_p must be less than or equal to 1.0"),
        ({"prompts": ["a"], "top_p_decay": 0.5}, "top_p_decay cannot be set without top_p"),
        (
            {"prompts": ["a"], "top_p": 0.5, "top_p_bound": 0.6},
            "top_p_bound must be greater than 0 and less than top_p",
        ),
        ({"prompts": ["a"], "add_BOS": 1}, "add_BOS must be a boolean value"),
        ({"prompts": [""]}, "Empty prompts require add_BOS=true"),
        ({"prompts": ["a"], "stop_on_eol": 1}, "stop_on_eol must be a boolean value"),
        ({"prompts": ["a"], "stop_on_double_eol": 1}, "stop_on_double_eol must be a boolean value"),
        ({"prompts": ["a"], "random_seed": "x"}, "random_seed must be integer"),
        ({"prompts": ["a"], "random_seed": -1}, "random_seed must be a positive integer"),
        ({"prompts": ["a"], "no_log": 1}, "no_log must be a boolean value"),
        ({"prompts": ["a"], "beam_width": "x"}, "beam_width must be integer"),
        ({"prompts": ["a"], "beam_width": 0}, "beam_width must be an integer > 1"),
        ({"prompts": ["a"], "beam_width": 200}, "beam_width must be at most 128"),
        (
            {"prompts": ["a", "b"], "beam_width": 2},
            "When doing beam_search, batch size must be 1",
        ),
        ({"prompts": ["a"], "stop_token": "x"}, "stop_token must be an integer"),
        ({"prompts": ["a"], "length_penalty": "x"}, "length_penalty must be a float"),
        ({"prompts": ["a"], "length_penalty": 10**400}, "length_penalty must be a float"),
    ],
)
def test_a_wrong_field_gets_the_message_of_megatron(server, fields, message):
    status, found = put(server, **fields)
    assert (status, found["message"]) == (400, message)


def test_what_cannot_be_done_is_refused(server):
    for fields, word in (
        ({"beam_width": 2, "prevent_newline_after_colon": True}, "beam_width does not go with"),
        ({"beam_width": 2, "stop_on_eol": True}, "beam_width does not go with"),
        ({"unheard_of": 1}, "unheard_of is no field"),
        ({"tokens_to_generate": 5000}, "maximum context length"),
        ({"tokens_to_generate": 12000}, "Too many tokens.  12001 is greater than 12000"),
    ):
        status, found = put(server, prompts=["a"], **fields)
        assert status == 400
        assert word in found["message"]
        assert found["error"]["message"] == found["message"], "both kinds of clients read it"


def test_prompts_are_refused_by_their_characters_before_they_are_tokenized(server):
    status, found = put(server, prompts=["a" * 10_000] * 100, tokens_to_generate=1)
    assert status == 400
    assert found["message"] == "Too many tokens.  1000000 characters are more than 12000 have"
    status, found = put(server, prompts=["a" * 100_000], tokens_to_generate=1)
    assert status == 400
    assert "maximum context length" in found["message"]


def test_post_completions_is_openai_s(server):
    status, found = server.ask("POST", "/completions", {"prompt": ["ab"], "max_tokens": 9})
    assert (status, found["choices"][0]["text"]) == (200, "ab")


def test_the_command_line_client_reports_an_error(server, capsys):
    argv = ["text_generation_cli.py", server.url.removeprefix("http://"), "--prompt", "a"]
    with (
        mock.patch.object(sys, "argv", [*argv, "--top-k", "5", "--top-p", "0.5"]),
        pytest.raises(SystemExit),
    ):
        text_generation_cli.main()
    assert re.search("400.*cannot set both top-k and top-p", capsys.readouterr().err)


def output_of_client(server, words, lines):
    """What the client prints with these words, for these lines from the terminal."""
    argv = ["text_generation_cli.py", server.url.removeprefix("http://"), *words]
    with (
        mock.patch.object(sys, "argv", argv),
        mock.patch("builtins.input", side_effect=[*lines, EOFError]),
        contextlib.redirect_stdout(io.StringIO()) as said,
    ):
        text_generation_cli.main()
    return said.getvalue().splitlines()


def test_the_command_line_client_prints_the_text(server):
    words = ["--num-tokens", "1", "--temperature", "0"]
    assert output_of_client(server, words, ["Hello"]) == ["Megatron Response: ", "HelloH"]


def test_the_command_line_client_asks_for_the_number_of_tokens_as_megatron_s(server):
    lines = ["Hello", "3", "Hello", "-1", "Hello", "1", "Hello"]
    assert output_of_client(server, [], lines) == [
        "Megatron Response: ",
        "HelloHello",
        "Error 400: tokens_to_generate must be an integer greater than or equal to 0",
        "Megatron Response: ",
        "HelloH",
    ]


def test_a_number_of_tokens_that_is_none_is_reported(server, capsys):
    with pytest.raises(SystemExit):
        output_of_client(server, [], ["Hello", "many"])
    assert "number of tokens 'many': give a whole number" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [("PUT", "/api", [], 400), ("PUT", "/nothing", {}, 404), ("POST", "/api", {}, 405)],
)
def test_every_error_has_the_message_where_megatron_s_clients_read_it(
    server, method, path, body, status
):
    found_status, found = server.ask(method, path, body)
    assert found_status == status
    assert found["message"] == found["error"]["message"] != ""

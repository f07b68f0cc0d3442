"""Bad requests: each gets a 4xx with OpenAI's error object, and the next answer is right."""

from __future__ import annotations

import contextlib
import json

import pytest

from tests.support import selection
from tests.support.server_process import fake_server

C = "/v1/completions"
H = "/v1/chat/completions"
A = "/api"
R = "/v1/responses"
HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f"}}
HALF = "\ud800"  # of a surrogate pair


def completion(**fields):
    return {"prompt": "abc", **fields}


def chat(**fields):
    return {"messages": HI, **fields}


def response(**fields):
    return {"input": "hi", **fields}


def tool(**function):
    return chat(tools=[{"type": "function", "function": {"name": "f", **function}}])


def called(arguments):
    call = {"id": "1", "function": {"name": "f", "arguments": arguments}}
    return {"messages": [*HI, {"role": "assistant", "tool_calls": [call]}]}


def nested(depth):
    value = {}
    for _ in range(depth):
        value = {"a": value}
    return value


# path, body, status, param
BAD = [
    (C, b"", 400, None),
    (C, b"{", 400, None),
    (C, b"[]", 400, None),
    (C, b"null", 400, None),
    (C, b'"text"', 400, None),
    (C, b'{"prompt": "a", "temperature": NaN}', 400, None),
    (C, b'{"prompt": "a", "temperature": Infinity}', 400, None),
    (C, b'{"prompt": "a", "temperature": 1e999}', 400, "temperature"),
    (C, b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}", 400, None),
    (C, b'{"prompt": "\xff\xfe"}', 400, None),
    (C, '{"prompt": "a"}'.encode("utf-16"), 400, None),
    (C, b'{"prompt": "\\ud800"}', 400, "prompt"),
    (C, b'{"prompt": "a", "\\ud800": 1}', 400, "\\ud800"),
    (C, b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400, None),
    (C, b'{"a":' * 50_000 + b"1" + b"}" * 50_000, 400, None),
    (C, {}, 400, "prompt"),
    (C, {"prompt": 5}, 400, "prompt"),
    (C, {"prompt": []}, 400, "prompt"),
    (C, {"prompt": [[]]}, 400, "prompt"),
    (C, {"prompt": ["a", 5]}, 400, "prompt"),
    (C, {"prompt": [1, "a"]}, 400, "prompt"),
    (C, {"prompt": [1, 600]}, 400, "prompt"),
    (C, {"prompt": [-1]}, 400, "prompt"),
    (C, {"prompt": [1.5]}, 400, "prompt"),
    (C, {"prompt": [True]}, 400, "prompt"),
    (C, {"prompt": [2**70]}, 400, "prompt"),
    (C, {"prompt": ["a"] * 3000}, 400, "prompt"),
    (C, {"prompt": "a " * 2000}, 400, "prompt"),
    (C, {"prompt": "a" * 100_000}, 400, "prompt"),
    (C, {"prompt": ["a", "a" * 100_000]}, 400, "prompt"),
    (C, {"prompt": [[1] * 1001]}, 400, "prompt"),
    (C, {"prompt": ""}, 400, "prompt"),
    (C, {"prompt": ["a", ""]}, 400, "prompt"),
    (C, completion(max_tokens=0), 400, "max_tokens"),
    (C, completion(max_tokens=-1), 400, "max_tokens"),
    (C, completion(max_tokens=1.5), 400, "max_tokens"),
    (C, completion(max_tokens="5"), 400, "max_tokens"),
    (C, completion(max_tokens=1000), 400, "max_tokens"),
    (C, completion(max_tokens=10**12), 400, "max_tokens"),
    (C, completion(temperature=-1), 400, "temperature"),
    (C, completion(temperature=2.1), 400, "temperature"),
    (C, completion(temperature="hot"), 400, "temperature"),
    (C, completion(temperature=True), 400, "temperature"),
    (C, completion(top_p=0), 400, "top_p"),
    (C, completion(top_p=1.1), 400, "top_p"),
    (C, completion(top_k=-2), 400, "top_k"),
    (C, completion(min_p=2), 400, "min_p"),
    (C, completion(n=0), 400, "n"),
    (C, completion(n=129), 400, "n"),
    (C, completion(n="2"), 400, "n"),
    (C, completion(best_of=0), 400, "best_of"),
    (C, completion(n=2, best_of=1), 400, "best_of"),
    (C, completion(best_of=2, stream=True), 400, "best_of"),
    (C, completion(prompt=["a"] * 100, n=100), 400, "n"),
    (C, completion(logprobs=21), 400, "logprobs"),
    (C, completion(logprobs=True), 400, "logprobs"),
    (C, completion(prompt_logprobs=-1), 400, "prompt_logprobs"),
    (C, completion(echo="yes"), 400, "echo"),
    (C, completion(prompt=["main( " * 1000] * 16, n=128, echo=True), 400, "echo"),
    (C, completion(stream=1), 400, "stream"),
    (C, completion(stream_options={"include_usage": True}), 400, "stream_options"),
    (
        C,
        completion(stream=True, stream_options={"usage": True}),
        400,
        "stream_options.usage",
    ),
    (C, completion(stop=5), 400, "stop"),
    (C, completion(stop=[5]), 400, "stop"),
    (C, completion(stop=""), 400, "stop"),
    (C, completion(stop=["a"] * 17), 400, "stop"),
    (C, completion(stop="a" * 257), 400, "stop"),
    (C, completion(seed=1.5), 400, "seed"),
    (C, completion(seed=2**64), 400, "seed"),
    (C, completion(presence_penalty=2.5), 400, "presence_penalty"),
    (C, completion(frequency_penalty=-2.5), 400, "frequency_penalty"),
    (C, completion(repetition_penalty=0), 400, "repetition_penalty"),
    (C, completion(logit_bias=[1]), 400, "logit_bias"),
    (C, completion(logit_bias={"x": 1}), 400, "logit_bias"),
    (C, completion(logit_bias={"600": 1}), 400, "logit_bias"),
    (C, completion(logit_bias={"5": 101}), 400, "logit_bias.5"),
    (C, completion(min_tokens=17), 400, "min_tokens"),
    (C, completion(stop_token_ids=[600]), 400, "stop_token_ids"),
    (C, completion(suffix="b"), 400, "suffix"),
    (C, completion(priority=1), 400, "priority"),
    (C, completion(allowed_token_ids=[]), 400, "allowed_token_ids"),
    (C, completion(allowed_token_ids=[600]), 400, "allowed_token_ids"),
    (C, completion(bad_words="a"), 400, "bad_words"),
    (C, completion(bad_words=[" "]), 400, "bad_words"),
    (C, completion(truncate_prompt_tokens=0), 400, "truncate_prompt_tokens"),
    (C, completion(truncate_prompt_tokens=2, echo=True), 400, "echo"),
    (C, completion(return_token_ids=1), 400, "return_token_ids"),
    (C, completion(cache_salt=1), 400, "cache_salt"),
    (C, completion(guided_json=5), 400, "guided_json"),
    (C, completion(guided_choice="a"), 400, "guided_choice"),
    (C, completion(guided_regex="a", guided_choice=["b"]), 400, "structured_outputs"),
    (C, completion(structured_outputs={"xml": 1}), 400, "structured_outputs.xml"),
    (C, completion(guided_decoding_backend="x"), 400, "guided_decoding_backend"),
    (
        H,
        chat(continue_final_message=True, add_generation_prompt=True),
        400,
        "add_generation_prompt",
    ),
    (H, chat(chat_template="x"), 400, "chat_template"),
    ("/tokenize", chat(n=2), 400, "n"),
    (R, {}, 400, "input"),
    (R, {"input": 5}, 400, "input"),
    (R, {"input": ["a"]}, 400, "input"),
    (R, {"input": [{"type": "item_reference", "id": "a"}]}, 400, "input"),
    (R, {"input": [{"role": "king", "content": "a"}]}, 400, "input.role"),
    (R, {"input": [{"role": "user", "content": [{"type": "x"}]}]}, 400, "input"),
    (R, {"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, 400, "input"),
    (R, {"input": [{"type": "reasoning", "content": 5}]}, 400, "input"),
    (R, {"input": [{"type": "function_call", "name": "f", "arguments": "{"}]}, 400, "input"),
    (R, response(previous_response_id="a"), 400, "previous_response_id"),
    (R, response(background=True), 400, "background"),
    (R, response(truncation="auto"), 400, "truncation"),
    (R, response(tools=[{"type": "web_search"}]), 400, "tools"),
    (R, response(tools=[{"type": "function"}]), 400, "tools"),
    (R, response(tool_choice="required"), 400, "tool_choice"),
    (R, response(max_output_tokens=0), 400, "max_output_tokens"),
    (R, response(max_tokens=5), 400, "max_tokens"),
    (R, response(messages=HI), 400, "messages"),
    (R, response(n=2), 400, "n"),
    (R, response(text={"format": {"type": "xml"}}), 400, "text.format.type"),
    (R, response(text={"format": {"type": "json_schema"}}), 400, "text.format"),
    (R, response(text={"x": 1}), 400, "text.x"),
    (R, response(metadata=5), 400, "metadata"),
    (R, response(include=["message.output_text.logprobs"]), 400, "include"),
    (R, response(temperature="hot"), 400, "temperature"),
    (R, response(new_field=1), 400, "new_field"),
    (C, completion(prompt=["a"] * 2048, logprobs=20), 400, "logprobs"),
    (C, completion(prompt=["a"] * 500, best_of=4, max_tokens=200, logprobs=1), 400, "logprobs"),
    (C, completion(n=128, max_tokens=900, logprobs=5, stream=True), 400, "logprobs"),
    (C, {"prompt": [[1] * 900] * 20, "max_tokens": 1, "prompt_logprobs": 20}, 400, "logprobs"),
    (
        C,
        {"prompt": [[1] * 900] * 400, "max_tokens": 0, "echo": True, "logprobs": 0},
        400,
        "logprobs",
    ),
    (H, chat(n=128, max_tokens=900, logprobs=True, top_logprobs=5), 400, "logprobs"),
    (C, completion(max_token=5), 400, "max_token"),
    (C, completion(model="other"), 404, "model"),
    (C, completion(model=5), 400, "model"),
    (H, {}, 400, "messages"),
    (H, {"messages": []}, 400, "messages"),
    (H, {"messages": "hi"}, 400, "messages"),
    (H, {"messages": ["hi"]}, 400, "messages"),
    (H, {"messages": [{"role": "king", "content": "a"}]}, 400, "messages.role"),
    (H, {"messages": [{"role": "user"}]}, 400, "messages.content"),
    (H, {"messages": [{"role": "user", "content": 5}]}, 400, "messages.content"),
    (H, {"messages": [{"role": "user", "content": "a", "x": 1}]}, 400, "messages.x"),
    (
        H,
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        400,
        "messages",
    ),
    (H, chat(top_logprobs=2), 400, "top_logprobs"),
    (H, chat(logprobs=2), 400, "logprobs"),
    (H, chat(max_tokens=0), 400, "max_tokens"),
    (H, chat(tools=[{"type": "web"}]), 400, "tools"),
    (H, chat(tools={}), 400, "tools"),
    (H, chat(tool_choice="auto"), 400, "tool_choice"),
    (H, chat(tools=[TOOL], tool_choice="always"), 400, "tool_choice"),
    (H, chat(tools=[TOOL], tool_choice={"function": {"name": "g"}}), 400, "tool_choice"),
    (H, chat(response_format={"type": "xml"}), 400, "response_format.type"),
    (H, chat(response_format={"type": "json_schema"}), 400, "response_format"),
    (H, chat(response_format={"type": "regex"}), 400, "response_format"),
    (H, chat(prompt="a"), 400, "prompt"),
    (H, {"messages": [{"role": "user", "content": "a" * 100_000}]}, 400, "messages"),
    (H, tool(name=HALF), 400, "tools"),
    (H, tool(name="f", description=HALF), 400, "tools"),
    (H, tool(parameters={"type": "object", HALF: {}}), 400, "tools"),
    (H, called({"a": HALF}), 400, "messages"),
    (H, called(json.dumps({"a": HALF})), 400, "messages"),
    (H, called('{"a": NaN}'), 400, "messages"),
    (H, called("[" * 900 + "]" * 900), 400, "messages"),
    (H, called("[" * 50_000), 400, "messages"),
    (H, {"messages": [{"role": "user", "content": "a", "name": HALF}]}, 400, "messages"),
    (H, chat(chat_template_kwargs={"a": HALF}), 400, "chat_template_kwargs"),
    (H, chat(chat_template_kwargs={HALF: 1}), 400, "chat_template_kwargs"),
    (H, chat(chat_template_kwargs=nested(300)), 400, None),
    (H, tool(parameters=nested(700)), 400, None),
    (H, tool(parameters=nested(330)), 400, None),
    (H, chat(response_format={"type": "regex", "regex": HALF}), 400, "response_format"),
    (C, completion(temperature=nested(700)), 400, None),
    (C, completion(temperature=nested(90)), 400, "temperature"),
    (C, completion(stop=HALF), 400, "stop"),
    (C, completion(user=HALF), 400, "user"),
    (C, {"prompt": [[]] * 70_000}, 400, None),
    (C, completion(stop_token_ids=False), 400, "stop_token_ids"),
    (C, completion(logit_bias={f"{i:06}": 1 for i in range(700)}), 400, "logit_bias"),
    ("/tokenize", {"prompt": HALF}, 400, "prompt"),
    ("/update_weights", {"load": HALF}, 400, "load"),
    ("/detokenize", {"tokens": [1, True]}, 400, "tokens"),
    ("/tokenize", {}, 400, "prompt"),
    ("/detokenize", {}, 400, "tokens"),
    ("/detokenize", {"tokens": [600]}, 400, "tokens"),
    ("/detokenize", {"tokens": "abc"}, 400, "tokens"),
    ("/nothing", {}, 404, None),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    template = folder / "template.jinja"
    template.write_text("{{ messages[-1].content }}")
    with fake_server(folder, "--chat-template", str(template)) as found:
        yield found


def _is_error(found, param):
    error = found["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["type"].endswith("error")
    assert error["param"] == param


@pytest.mark.parametrize("number", range(len(BAD)))
def test_a_bad_request_is_refused_and_the_next_one_answered(server, number):
    path, body, status, param = BAD[number]
    found_status, found = server.ask("POST", path, body)
    assert (found_status, found["error"]["param"]) == (status, param), found
    _is_error(found, param)
    status, found = server.ask("POST", C, {"prompt": "abc", "max_tokens": 99})
    assert (status, found["choices"][0]["text"]) == (200, "abc")


@pytest.mark.feature("Serving: /openapi.json and /docs describe the fields of each path")
def test_the_described_ranges_are_those_that_the_server_checks(server):
    status, found = server.ask("GET", "/openapi.json")
    assert status == 200

    def fields_of(path):
        content = found["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        assert content["schema"]["additionalProperties"] is False
        return content["schema"]["properties"]

    known = {path: fields_of(path) for path in (C, H, R, "/tokenize", "/detokenize")}
    assert {"prompt", "messages", "tools"} <= known["/tokenize"].keys()
    assert known[C]["stream_options"]["properties"].keys() == {"include_usage"}
    assert not {"messages", "max_tokens"} & known[R].keys()
    assert known["/detokenize"]["tokens"]["items"]["maximum"] == 599
    checked = set()
    for path, body in ((C, completion()), (H, chat()), (R, response())):
        for name, schema in known[path].items():
            kind = schema.get("type", [None])[0]
            wrong = {"boolean": "yes", "string": 5, "object": 5, "array": 5}.get(kind)
            if "maximum" in schema and kind in ("integer", "number"):
                wrong = schema["maximum"] + 1
            if wrong is None or (path, name) == (R, "input"):
                continue
            status, answer = server.ask("POST", path, {**body, name: wrong})
            assert (status, answer["error"]["param"]) == (400, name), (path, name, answer)
            checked.add(name)
    assert len(checked) > 40
    for path, methods in found["paths"].items():
        assert all(operation["summary"] for operation in methods.values()), path


def test_the_description_is_that_of_openapi(server):
    validator = pytest.importorskip("openapi_spec_validator")
    validator.validate(server.ask("GET", "/openapi.json")[1])


def test_small_pages_answer(server):
    assert server.ask("GET", "/ping")[0] == 200
    assert server.ask("GET", "/version")[1].keys() == {"version"}
    status, headers, content = server.ask_raw("GET", "/docs")
    assert (status, b"openapi.json" in content) == (200, True)
    assert "default-src 'none'" in headers["content-security-policy"]


def test_no_request_of_them_is_open(server):
    assert server.metric("megatron_engine_num_running") == 0
    assert server.metric("megatron_open_samples") == 0


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("GET", C, {}, 405),
        ("POST", A, {}, 405),
        ("DELETE", "/v1/models", {}, 405),
        ("POST", C, {"Content-Type": "image/png"}, 415),
        ("POST", C, {"Content-Type": "text/plain"}, 415),
        (
            "POST",
            C,
            {"Content-Type": "application/x-www-form-urlencoded", "Origin": "http://evil"},
            403,
        ),
        ("POST", "/update_weights", {"Host": "evil.example"}, 403),
        ("GET", "/v1/models/other", {}, 404),
        ("GET", "/../etc/passwd", {}, 404),
    ],
)
def test_wrong_methods_types_and_paths(server, method, path, headers, status):
    body = None if method in ("GET", "DELETE") else {"prompt": "a"}
    found_status, found = server.ask(method, path, body, headers)
    assert found_status == status
    assert found["error"]["message"]


def test_a_body_that_is_too_long_is_refused_before_it_is_read(server):
    connection = server.connect()
    connection.putrequest("POST", C)
    connection.putheader("Content-Length", str(100 << 20))
    connection.endheaders()
    answer = connection.getresponse()  # nothing of the body has been sent
    assert answer.status == 413
    _is_error(json.loads(answer.read()), None)


def test_a_long_body_without_a_length_is_refused(server):
    connection = server.connect()
    parts = (b"a" * (1 << 20) for _ in range(100))
    with contextlib.suppress(OSError):  # the server has answered and closed
        connection.request("POST", C, parts, {"Content-Type": "application/json"})
    assert connection.getresponse().status == 413


def test_a_client_that_is_curl_is_understood(server):
    kind = {"Content-Type": "application/x-www-form-urlencoded"}
    status, found = server.ask("POST", C, {"prompt": "abc", "max_tokens": 9}, kind)
    assert (status, found["choices"][0]["text"]) == (200, "abc")


def test_grammars_need_an_engine_that_has_them(tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text("x")
    words = ("--features", "none", "--chat-template", str(template))
    with fake_server(tmp_path / "bpe", *words) as server:
        for body, param in (
            (chat(response_format={"type": "json_object"}), "response_format"),
            (chat(tools=[TOOL], tool_choice="required"), "tool_choice"),
        ):
            status, found = server.ask("POST", H, body)
            assert (status, found["error"]["param"]) == (400, param)
        status, found = server.ask("POST", "/update_weights", {"load": "x"})
        assert status == 501


def test_a_chat_without_a_template_is_refused(tmp_path):
    with fake_server(tmp_path / "bpe") as server:
        status, found = server.ask("POST", H, chat())
        assert (status, found["error"]["code"]) == (400, "no_chat_template")
        assert "--chat-template" in found["error"]["message"]


HOSTILE = {
    "endless loop": "{% for a in range(99999) %}{% for b in range(99999) %}"
    "{% endfor %}{% endfor %}",
    "much memory of variables": "{{ messages[0].content * 10**10 }}",
    "much memory": "{{ 'a' * 10**10 }}",
    "wide format": "{{ '%999999999d' % 1 }}",
    "classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ raise_exception.__globals__.x }}",
    "syntax": "{% for %}",
    "missing name": "{{ nothing.at.all }}",
    "file": "{% include '/etc/passwd' %}",
    "its own error": "{{ raise_exception('roles must alternate') }}",
    "division": "{{ 1 / 0 }}",
}
DEFAULT = ["endless loop", "much memory", "classes", "syntax", "its own error"]


@pytest.mark.parametrize("name", selection.only(DEFAULT, HOSTILE))
def test_a_hostile_template_harms_nobody(tmp_path, name):
    template = tmp_path / "template.jinja"
    template.write_text(HOSTILE[name])
    with fake_server(tmp_path / "bpe", "--chat-template", str(template)) as server:
        for _ in range(2):
            status, found = server.ask("POST", H, chat())
            assert status == 400
            _is_error(found, "messages")
        assert server.ask("POST", C, {"prompt": "abc"})[0] == 200

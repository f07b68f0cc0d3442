"""Vectors, adapters, pauses and pushes of weights over HTTP; the engine's tokens are known."""

from __future__ import annotations

import base64
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests.support.server_process import fake_server, openai

HELLO = [40, 413, 79]  # the tokens of "Hello"
WAITING = {"prompt": [0, 40], "max_tokens": 3, "ignore_eos": True}  # until the gate is open


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("control") / "gate"


@pytest.fixture(scope="module")
def server(gate: Path):
    words = ("--features", "control", "runtime_adapters", "--gate", str(gate))
    with fake_server(gate.parent / "server", *words) as found:
        yield found


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as found:
        yield found


def unit(values: list[float]) -> pytest.approx:
    return pytest.approx(np.array(values) / np.linalg.norm(values), rel=1e-6)


@pytest.mark.feature("Serving: OpenAI's client gets vectors of texts")
def test_inputs_are_texts_or_ids_and_vectors_floats_or_base64(client):
    for given, count in (("Hello", 1), (HELLO, 1), (["Hello", "Hello"], 2), ([HELLO] * 2, 2)):
        found = client.embeddings.create(model="fake", input=given)  # the client asks for base64
        assert [(d.index, d.embedding) for d in found.data] == [
            (i, unit([*HELLO, 0])) for i in range(count)
        ]
        assert found.usage.prompt_tokens == found.usage.total_tokens == 3 * count
    found = client.embeddings.create(
        model="fake",
        input="Hello",
        encoding_format="float",
        dimensions=4,
        extra_body={"pooling": "mean", "use_activation": False},
    )
    assert found.data[0].embedding == [*HELLO, 1]


def test_base64_is_that_of_float32(server):
    body = {"input": "Hello", "encoding_format": "base64", "use_activation": False}
    status, found = server.ask("POST", "/v1/embeddings", body)
    assert status == 200
    assert np.frombuffer(base64.b64decode(found["data"][0]["embedding"]), "<f4").tolist() == [
        *HELLO,
        0,
    ]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dimensions", 3),
        ("input", []),
        ("input", [""]),
        ("input", [[10**6]]),
        ("input", "x " * 3000),
        ("encoding_format", "int8"),
        ("pooling", "max"),
        ("temperature", 1),
    ],
)
def test_a_wrong_field_is_named(server, field, value):
    status, found = server.ask("POST", "/v1/embeddings", {"input": "Hello", field: value})
    assert (status, found["error"]["param"]) == (400, field)
    assert field in found["error"]["message"]


@pytest.mark.feature("Serving: adapters are loaded, named as a model, listed and unloaded")
def test_an_adapter_is_a_model_until_it_is_unloaded(server, client, tmp_path):
    def ask(action: str, **body: object) -> tuple[int, str]:
        status, _, text = server.ask_raw("POST", f"/v1/{action}_lora_adapter", body)
        return status, text.decode()

    given = {"lora_name": "sql", "lora_path": str(tmp_path)}
    assert ask("load", **given) == (200, "adapter sql is loaded")
    for body, status, reason in (
        (given, 400, "lora_name: sql is loaded"),
        ({"lora_name": "x"}, 400, "give the adapter's name and its folder"),
        ({**given, "lora_name": "fake"}, 400, "fake is the name of the model"),
        ({"lora_name": "x", "lora_path": "/nowhere"}, 404, "lora_path: /nowhere"),
    ):
        found = ask("load", **body)
        assert found[0] == status
        assert reason in found[1]
    assert ask("load", **given, load_inplace=True)[0] == 200
    fake, adapter = client.models.list().data
    assert (fake.id, adapter.id, adapter.parent, adapter.root) == (
        *("fake", "sql", "fake"),
        str(tmp_path),
    )
    assert client.models.retrieve("sql").id == "sql"
    found = client.completions.create(model="sql", prompt="Hello", max_tokens=2)
    assert found.model == "sql"
    assert client.embeddings.create(model="sql", input="Hello").model == "sql"
    assert ask("unload", lora_name="sql")[0] == 200
    assert ask("unload", lora_name="sql")[0] == 404
    assert ask("unload")[0] == 400
    with pytest.raises(openai.NotFoundError, match="'sql' is not served here"):
        client.completions.create(model="sql", prompt="Hello")


@pytest.mark.feature("Serving: pause, resume, weight push and cache reset")
def test_a_pause_freezes_aborts_or_waits(server, gate):
    def ask(method: str, path: str) -> object:
        status, found = server.ask(method, path)
        assert status == 200, found
        return found

    def is_paused() -> bool:
        return ask("GET", "/is_paused")["is_paused"]

    def complete(body: object) -> tuple[int, str]:
        status, found = server.ask("POST", "/v1/completions", body)
        return status, found["choices"][0]["finish_reason"] if status == 200 else ""

    short = {"prompt": "Hello", "max_tokens": 2}
    with ThreadPoolExecutor(2) as pool:
        assert ask("POST", "/pause?mode=keep") == {"status": "paused"}
        assert is_paused()
        kept = pool.submit(complete, short)
        while server.metric("megatron_engine_num_running") < 1:  # accepted, and no step
            assert not kept.done()
        assert ask("POST", "/resume") == {"status": "resumed"}
        assert kept.result() == (200, "length")
        resets = server.metric("megatron_engine_num_resets")

        aborted = pool.submit(complete, WAITING)
        while server.metric("megatron_engine_num_running") < 1:
            assert not aborted.done()
        ask("POST", "/pause")
        assert aborted.result() == (200, "abort")
        assert complete(short)[0] == 503
        assert server.metric("megatron_engine_num_resets") == resets + 1
        assert server.ask("POST", "/update_weights", {"load": "x"}) == (200, {"weight_version": 1})
        found = server.ask("POST", "/update_weights_from_disk", {"model_path": "x"})[1]
        assert found["success"] is True
        ask("POST", "/resume")
        assert not is_paused()

        finished = pool.submit(complete, WAITING)
        while server.metric("megatron_engine_num_running") < 1:
            assert not finished.done()
        waits = pool.submit(ask, "POST", "/pause?mode=wait&clear_cache=false")
        while complete(short)[0] != 503:
            pass
        assert not is_paused()
        gate.touch()
        assert waits.result() == {"status": "paused"}
        assert finished.result() == (200, "length")
        assert is_paused()
        assert server.metric("megatron_engine_num_resets") == resets + 1
        assert ask("POST", "/reset_prefix_cache") == {"success": True}
        assert server.metric("megatron_engine_num_resets") == resets + 2
        ask("POST", "/resume")
        assert complete(short) == (200, "length")
    assert server.ask("POST", "/pause?mode=now")[0] == 400
    assert server.ask("POST", "/pause?clear_cache=maybe")[0] == 400

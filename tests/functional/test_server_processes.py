"""The processes of a server: their ends, full queues, clients that leave or send slowly."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support import selection
from tests.support.server_process import TIMEOUT_S, fake_server

GATED = "<|endoftext|>abc"  # waits until the gate exists
ENDLESS = {"prompt": "ab", "max_tokens": 900, "ignore_eos": True}


@pytest.fixture
def gate(tmp_path):
    return tmp_path / "gate"


@pytest.fixture
def server(tmp_path, gate):
    with fake_server(tmp_path / "bpe", "--gate", str(gate)) as found:
        yield found


def _begin(server, body):
    """Send a request and return its connection, without reading the answer."""
    connection = server.connect()
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    return connection


def _wait_for(server, name, value):
    """Ask for a metric until it has a value."""
    for _ in range(5000):
        if (found := server.metric(name)) == value:
            return
    raise AssertionError(f"{name} stays {found}")


@pytest.mark.feature("Serving: a server that receives SIGTERM finishes its open requests")
def test_sigterm_finishes_open_requests_and_refuses_new_ones(server, gate):
    connection = _begin(server, {"prompt": GATED, "max_tokens": 4, "ignore_eos": True})
    _wait_for(server, "megatron_engine_num_running", 1)
    server.process.send_signal(signal.SIGTERM)
    status = 200
    while status == 200:  # until the signal has arrived
        status, body = server.ask("GET", "/health")
    assert status == 503
    status, headers, content = server.ask_raw("POST", "/v1/completions", {"prompt": "a"})
    assert (status, headers["retry-after"]) == (503, "5")
    gate.touch()
    found = json.loads(connection.getresponse().read())
    assert found["choices"][0]["text"].startswith("<|endoftext|>a")
    assert server.process.wait(TIMEOUT_S) == 0
    assert "open 0" in server.process.stdout.read()


def test_sigterm_ends_a_server_whose_client_reads_nothing(tmp_path):
    with fake_server(tmp_path / "bpe", "--drain-limit-s", "0.1") as server:
        unread = _begin(server, {**ENDLESS, "stream": True, "n": 12, "logprobs": 20})
        _wait_for(server, "megatron_engine_num_running", 0)  # all is generated, not sent
        assert server.metric("megatron_open_samples") > 0
        assert server.end() == 0
        output = "".join(server.lines)
        assert "1 requests are not answered 0.1 s after SIGTERM" in output
        assert "Traceback" not in output
        unread.close()


def test_a_client_that_reads_nothing_is_given_up(tmp_path):
    with fake_server(tmp_path / "bpe", "--unread-limit-s", "0.1") as server:
        unread = _begin(server, {**ENDLESS, "stream": True, "n": 12, "logprobs": 20})
        _wait_for(server, "megatron_open_samples", 12)
        _wait_for(server, "megatron_open_samples", 0)
        assert server.ask("POST", "/v1/completions", {"prompt": "a"})[0] == 200
        unread.close()


def test_a_connection_whose_headers_do_not_end_is_closed(tmp_path):
    with fake_server(tmp_path / "bpe", "--header-limit-s", "0.1") as server:
        begun = [b"", b"GET /health HTTP/1.1\r\n", b"GET /v1/models HTTP/1.1\r\nHost: localhost"]
        for data in begun:
            with socket.create_connection(server.address, TIMEOUT_S) as connection:
                connection.sendall(data)
                with contextlib.suppress(ConnectionResetError):
                    assert connection.recv(1) == b""
        assert server.ask("POST", "/v1/completions", {"prompt": "a"})[0] == 200


def test_a_killed_engine_fails_open_requests(server):
    plain = _begin(server, {"prompt": GATED})
    stream = _begin(server, {"prompt": GATED, "stream": True})
    _wait_for(server, "megatron_engine_num_running", 2)
    os.kill(server.process.pid, signal.SIGKILL)
    for connection in (plain, stream):
        answer = connection.getresponse()
        text = answer.read().decode()
        assert "engine's process has ended" in text
        assert answer.status == (500 if connection is plain else 200)
    assert server.process.wait(TIMEOUT_S) == -signal.SIGKILL
    assert "EngineDied" in server.process.stdout.read()  # the end of the front end, too
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(server.address)


def test_a_killed_front_end_ends_the_engine(server):
    connection = _begin(server, {"prompt": GATED})
    _wait_for(server, "megatron_engine_num_running", 1)
    children = f"/proc/{server.process.pid}/task/{server.process.pid}/children"
    with open(children, encoding="ascii") as file:
        (front_end,) = map(int, file.read().split())
    os.kill(front_end, signal.SIGKILL)
    assert server.process.wait(TIMEOUT_S) != 0
    assert "open 0" in server.process.stdout.read()
    with pytest.raises(ConnectionError):
        connection.getresponse()


def test_a_full_queue_asks_clients_to_come_back(tmp_path, gate):
    with fake_server(tmp_path / "bpe", "--gate", str(gate), "--max-requests", "2") as server:
        connections = [_begin(server, {"prompt": GATED}) for _ in range(2)]
        _wait_for(server, "megatron_engine_num_running", 2)
        status, headers, content = server.ask_raw("POST", "/v1/completions", {"prompt": "a"})
        assert (status, headers["retry-after"]) == (429, "1")
        assert json.loads(content)["error"]["code"] == "queue_full"
        gate.touch()
        for connection in connections:
            assert connection.getresponse().status == 200
        _wait_for(server, "megatron_engine_num_running", 0)
        gate.unlink()  # the next ones wait again
        status, _ = server.ask("POST", "/v1/completions", {"prompt": GATED, "n": 3})
        assert status == 429
        _wait_for(server, "megatron_engine_num_running", 0)  # none of the three stays
        assert server.ask("POST", "/v1/completions", {"prompt": "a"})[0] == 200


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_client_that_leaves_aborts_its_request(server, is_stream):
    connection = _begin(server, {**ENDLESS, "prompt": GATED, "stream": is_stream, "n": 3})
    _wait_for(server, "megatron_engine_num_running", 3)
    connection.close()
    _wait_for(server, "megatron_engine_num_running", 0)
    assert server.metric("megatron_open_samples") == 0


@pytest.mark.parametrize("count", selection.first(1, [100, 1000]))
def test_clients_that_leave_leave_nothing(server, count):
    def leave(number):
        connection = _begin(server, {**ENDLESS, "stream": number % 2 == 0})
        if number % 4 == 0:
            connection.getresponse().read(10)
        connection.close()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(leave, range(count)))
    _wait_for(server, "megatron_engine_num_running", 0)
    _wait_for(server, "megatron_open_samples", 0)
    status, found = server.ask("POST", "/v1/completions", {"prompt": "abc"})
    assert (status, found["choices"][0]["text"]) == (200, "abc")


def test_a_slow_sender_delays_nobody(server):
    slow = server.connect()
    slow.putrequest("POST", "/v1/completions")
    slow.putheader("Content-Length", "21")
    slow.endheaders()
    slow.send(b'{"prompt"')
    assert server.ask("POST", "/v1/completions", {"prompt": "abc"})[0] == 200
    slow.send(b': "abcdefg"}')
    assert json.loads(slow.getresponse().read())["choices"][0]["text"] == "abcdefg"


@pytest.mark.parametrize(
    ("path", "size", "status"),
    [("/v1/completions", 1, 400), ("/v1/completions", 100, 200), ("/none", 1, 400)],
)
def test_a_body_in_many_tiny_chunks_is_refused(server, path, size, status):
    parts = [b" " * size] * 3000 + [b'{"prompt": "a", "max_tokens": 1}']
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n".encode()
    with socket.create_connection(server.address, TIMEOUT_S) as connection:
        connection.sendall(head + b"Connection: close\r\n\r\n" + chunks + b"0\r\n\r\n")
        assert connection.recv(12) == b"HTTP/1.1 %d" % status
    assert server.ask("GET", "/health")[0] == 200
    assert server.end() == 0
    assert "Traceback" not in "".join(server.lines)


def test_a_slow_reader_delays_nobody(server):
    slow = _begin(server, {**ENDLESS, "stream": True, "n": 12, "logprobs": 20})
    found = server.ask("POST", "/v1/completions", {"prompt": "abc"})[1]
    assert found["choices"][0]["text"] == "abc"
    events = slow.getresponse().read().decode().split("\n\n")
    assert events[-2] == "data: [DONE]"
    assert sum('"finish_reason":"length"' in event for event in events) == 12


def test_a_used_port_is_reported(server, tmp_path):
    host, port = server.address
    with (
        pytest.raises(AssertionError, match=f"LaunchError.*{port}"),
        fake_server(tmp_path / "bpe", "--port", str(port)),
    ):
        pass


def test_prometheus_reads_the_metrics(server):
    parser = pytest.importorskip("prometheus_client.parser")
    server.ask("POST", "/v1/completions", {"prompt": "abc", "max_tokens": 2})
    server.ask("GET", "/nothing/here")
    text = server.ask_raw("GET", "/metrics")[2].decode()
    found = {s.name: s for f in parser.text_string_to_metric_families(text) for s in f.samples}
    assert found["megatron_generation_tokens_total"].value == 2
    assert found["megatron_prompt_tokens_total"].value >= 1
    assert found["megatron_requests_total"].labels == {"finish_reason": "length"}
    assert found["megatron_time_to_first_token_seconds_count"].value == 1
    assert found["megatron_engine_num_running"].value == 0
    paths = set(re.findall(r'path="([^"]*)"', text))
    assert "/nothing/here" not in paths  # clients cannot make up labels


def test_many_clients_get_their_own_answers(server):
    def ask(number):
        found = server.ask(
            "POST", "/v1/completions", {"prompt": f"text {number}", "max_tokens": 99}
        )
        return found[1]["choices"][0]["text"]

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(ask, range(200))) == [f"text {number}" for number in range(200)]

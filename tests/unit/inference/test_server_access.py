"""Who may use the front end: keys, Host and Origin."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import pytest

pytest.importorskip("starlette")

from starlette.requests import HTTPConnection

from megatron.inference.server.app import FrontEnd
from megatron.inference.server.http import is_loopback

HOST = "localhost:5000"


def ask(app, path, method="GET", **headers):
    """Return status and body of the answer to a request without a body."""
    return answer_of(app, path, method, **headers)[:2]


def answer_of(app, path, method="GET", **headers):
    """Return the same, and the headers of the answer."""
    sent = []

    async def receive():
        return {"type": "http.request", "body": b"{}"}

    async def send(message):
        sent.append(message)

    found = [(k.replace("_", "-").encode(), v.encode()) for k, v in headers.items()]
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "root_path": "",
        "query_string": b"",
        "headers": found,
        "server": ("127.0.0.1", 5000),
        "client": ("127.0.0.1", 40000),
    }
    asyncio.run(app(scope, receive, send))
    body = b"".join(m.get("body", b"") for m in sent[1:])
    return sent[0]["status"], body, dict(sent[0]["headers"])


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/tokenizer_info"])
def test_a_path_needs_its_key_whatever_url_the_host_header_makes(path, monkeypatch):
    """Starlette before 1.1 writes the Host header into the URL, and with it another path."""
    monkeypatch.setattr(HTTPConnection, "url", SimpleNamespace(path="/health"))
    app = FrontEnd(["key"], 100)
    assert ask(app, path, host="x/health?")[0] == 401
    assert ask(app, path, host="x/health?", authorization="Bearer key")[0] == 503  # no model yet
    assert ask(app, "/health", host="x")[0] == 503
    assert ask(app, "/", host="x")[0] == 200


def test_a_path_with_another_end_is_not_redirected_to_the_host_of_the_client():
    assert ask(FrontEnd([], 100), "/health/", host="evil.example")[0] == 404


@pytest.mark.parametrize("path", ["/", "/health", "/metrics", "/update_weights", "/nothing"])
@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example"},
        {"host": "evil.example:5000"},
        {"host": "127.0.0.1.evil.example"},
        {"host": "localhost.evil.example"},
        {"host": "localhost:5000@evil.example"},
        {"host": ""},
        {"host": "10.0.0.1"},
        {"host": HOST, "origin": "http://evil.example"},
        {"host": HOST, "origin": "http://localhost:3000"},
        {"host": HOST, "origin": "null"},
    ],
    ids=str,
)
def test_another_site_gets_nothing_from_a_local_server_without_keys(path, headers):
    method = "POST" if path == "/update_weights" else "GET"
    status, body = ask(FrontEnd([], 100, "localhost"), path, method, **headers)
    assert status == 403
    assert "--api-key-file" in json.loads(body)["error"]["message"]


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"host": HOST},
        {"host": "LOCALHOST"},
        {"host": "127.0.0.1:5000", "origin": "http://127.0.0.1:5000"},
        {"host": "127.8.8.8"},
        {"host": "[::1]:5000"},
        {"host": "Workstation:5000"},
    ],
    ids=str,
)
def test_this_machine_uses_a_local_server_without_keys(headers):
    assert ask(FrontEnd([], 100, "workstation"), "/", **headers)[0] == 200


@pytest.mark.parametrize(("keys", "name"), [(["key"], "localhost"), ([], None)])
def test_a_server_with_keys_or_on_a_network_has_any_name(keys, name):
    assert ask(FrontEnd(keys, 100, name), "/", host="public.example")[0] == 200


def test_another_site_sends_no_form_to_a_server_with_keys():
    """A browser asks before a page of another site sends JSON, but not before it sends a form."""
    app = FrontEnd(["key"], 100)
    app.service = SimpleNamespace(
        client=SimpleNamespace(failure=None),
        metrics=SimpleNamespace(answered=lambda path, status: None),
    )
    headers = {"host": HOST, "authorization": "Bearer key"}
    for kind in ("", "application/x-www-form-urlencoded"):
        given = {**headers, "content_type": kind, "origin": "http://evil.example"}
        assert ask(app, "/tokenize", "POST", **given)[0] == 415


@pytest.mark.parametrize(
    ("address", "expected"),
    [("127.0.0.1", True), ("127.3.2.1", True), ("::1", True), ("::", False), ("0.0.0.0", False)],
)
def test_the_address_of_the_socket_says_who_reaches_it(address, expected):
    assert is_loopback(address) == expected


def test_a_request_with_two_lengths_is_the_last_of_its_connection():
    front_end = FrontEnd(["key"], 1 << 20)
    lengths = {"content_length": "4", "transfer_encoding": "chunked"}
    status, body, headers = answer_of(front_end, "/health", **lengths)
    assert (status, headers[b"connection"]) == (400, b"close")
    assert "Transfer-Encoding or Content-Length" in json.loads(body)["message"]

"""The page at / in headless Chromium: it chats and shows the probabilities of tokens."""

from __future__ import annotations

import pytest

from tests.support.browser import browser, needs_chromium
from tests.support.server_process import fake_server

pytestmark = needs_chromium

# Send a text and wait for the end of the answer.
SEND = """(() => {{
  delete document.body.dataset.state;
  const ended = new Promise((resolve) => new MutationObserver((_, observer) => {{
    if (document.body.dataset.state === "done") {{ observer.disconnect(); resolve(); }}
  }}).observe(document.body, {{ attributes: true }}));
  document.getElementById("mode").value = {mode!r};
  document.getElementById("prompt").value = {text!r};
  document.getElementById("send").click();
  return ended;
}})()"""
TURNS = "[...document.querySelectorAll('.turn')].map((t) => [t.dataset.role, t.textContent])"


@pytest.mark.feature("Serving: a page to chat and to look at the probabilities of tokens")
def test_the_page_chats_and_shows_probabilities(tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[-1].content }}")
    words = ("--chat-template", str(template))
    with fake_server(tmp_path / "bpe", *words) as server, browser(tmp_path / "profile") as page:
        page.open(server.url)
        page.run(SEND.format(mode="chat", text="Hello <b>"))
        assert page.run(TURNS) == [["user", "Hello <b>"], ["model", "Hello <b>"]]
        tokens = page.run("[...document.querySelectorAll('.token')].map((t) => t.textContent)")
        assert tokens[:3] == ["H", "ell", "o"]
        page.run("document.querySelector('.token').click()")
        details = page.run("document.getElementById('details').innerText")
        assert "100.00 %" in details  # the most likely token, whose log-probability is 0
        assert "36.79 %" in details
        page.run("document.getElementById('clear').click()")
        page.run(SEND.format(mode="text", text="a \U0001f600"))
        assert page.run(TURNS) == [["prompt", "a \U0001f600"], ["model", "a \U0001f600"]]
        assert page.run("document.getElementById('model').textContent") == "fake"
        assert page.run("document.getElementById('error').textContent") == ""
        wrong = {"Runtime.exceptionThrown", "Log.entryAdded", "Network.loadingFailed"}
        assert [e for e in page.events if e["method"] in wrong] == []
        urls = [
            e["params"]["request"]["url"]
            for e in page.events
            if e["method"] == "Network.requestWillBeSent"
        ]
        assert all(url.startswith(server.url) for url in urls)


def test_the_page_of_paths_lists_their_fields(tmp_path):
    with fake_server(tmp_path / "bpe") as server, browser(tmp_path / "profile") as page:
        page.open(f"{server.url}/docs")
        page.run(
            "new Promise((resolve) => { const look = () => document.body.dataset.state ? resolve()"
            " : setTimeout(look, 10); look(); })"
        )
        paths = page.run("[...document.querySelectorAll('summary code')].map((c) => c.textContent)")
        assert {"/v1/responses", "/api", "/v1/models/{name}"} <= {*paths}
        rows = page.run("[...document.querySelectorAll('tr')].map((row) => row.textContent)")
        assert "temperaturenumber0 to 21" in rows


def test_the_page_shows_an_error(tmp_path):
    with fake_server(tmp_path / "bpe") as server, browser(tmp_path / "profile") as page:
        page.open(server.url)
        page.run(SEND.format(mode="chat", text="Hello"))
        assert "chat template" in page.run("document.getElementById('error').textContent")
        assert page.run(TURNS) == [["user", "Hello"]]

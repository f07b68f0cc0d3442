"""The server of a checkpoint: the tokens of its engine, on one rank and on two."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from megatron.core.config.errors import LaunchError
from megatron.core.inference.sampling_params import SamplingParams
from megatron.inference import LLM
from tests.support import forked
from tests.support.ranks import run_ranks
from tests.support.runs import TINY, run_gpt
from tests.support.server_process import ROOT, TIMEOUT_S, started
from tests.support.tokenizer_files import write_bpe

PROMPTS = ("def main(", "Hello", "The \U0001f600 of it", "x" * 40)
NUM_TOKENS = 12
TOOL = str(ROOT / "tools" / "run_text_generation_server.py")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a GPT with a byte-level BPE, and 64 positions."""
    return _trained(tmp_path_factory, "1234")


@pytest.fixture(scope="module")
def other_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the same model with other weights."""
    return _trained(tmp_path_factory, "5")


def _trained(tmp_path_factory: pytest.TempPathFactory, seed: str) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    tokenizer = write_bpe(tmp_path_factory.mktemp("tokenizer"))
    flags = "--tokenizer-type HuggingFaceTokenizer --max-position-embeddings 64 --save-interval 6"
    words = [*flags.split(), "--tokenizer-model", str(tokenizer), "--save", str(folder / "ck")]
    words += ["--seed", seed]
    run_gpt(folder / "run", *words, base=TINY)
    return folder / "ck"


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[str]:
    """The greedy texts that the engine writes without a server."""
    found: list[list[str]] = run_ranks(_texts, 1, str(checkpoint))
    return found[0]


def _texts(rank: int, world_size: int, folder: str) -> list[str]:
    return _texts_of(LLM.load(folder, device_kind="cpu"))


def _texts_of(llm: LLM) -> list[str]:
    params = SamplingParams(temperature=0.0, num_tokens_to_generate=NUM_TOKENS)
    return [answer.text for answer in llm.generate(PROMPTS, params)]


def _completions(server, prompt: str, weight_version: int = 0) -> str:
    body = {"prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0}
    status, found = server.ask("POST", "/v1/completions", body)
    assert status == 200, found
    assert found["choices"][0]["weight_version"] == weight_version
    return found["choices"][0]["text"]


@pytest.mark.feature("Serving: one command serves a checkpoint with the tokens of its engine")
def test_clients_at_the_same_time_get_the_text_of_the_engine(checkpoint, expected):
    command = [forked.python(), TOOL, "--load", str(checkpoint), "--device", "cpu", "--port", "0"]
    template = checkpoint.parent / "template.jinja"
    template.write_text("{{ messages[-1].content }}")
    command += ["--chat-template", str(template), "--num-layers", "9", "--top_k", "5"]
    with started(command) as server:
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(lambda p: _completions(server, p), PROMPTS)) == expected
        output = "".join(server.lines)
        assert "--top_k: without effect, each request has its own values" in output
        assert "--num-layers: without effect, model and tokenizer are those of the" in output
        assert server.ask("GET", "/v1/models")[1]["data"][0]["id"] == "ck"
        assert server.metric("megatron_engine_num_running") == 0
        sampled = {"prompt": "ab", "max_tokens": 8, "seed": 7, "n": 2}
        first = server.ask("POST", "/v1/completions", sampled)[1]
        second = server.ask("POST", "/v1/completions", sampled)[1]
        assert first["choices"] == second["choices"]
        assert first["choices"][0]["text"] != first["choices"][1]["text"]
        status, found = server.ask("POST", "/v1/completions", {"prompt": "a b " * 40})
        assert (status, found["error"]["code"]) == (400, "context_length_exceeded")
        scored = {"prompt": PROMPTS[0], "max_tokens": 0, "echo": True, "logprobs": 1}
        table = server.ask("POST", "/v1/completions", scored)[1]["choices"][0]["logprobs"]
        assert table["token_logprobs"][0] is None
        assert all(value < 0 for value in table["token_logprobs"][1:])
        both = server.ask("POST", "/v1/completions", {**scored, "n": 2, "max_tokens": 2})[1]
        for choice in both["choices"]:
            values = choice["logprobs"]["token_logprobs"]
            expected_values = table["token_logprobs"][1:]
            assert values[1 : len(table["tokens"])] == pytest.approx(expected_values, rel=1e-4)
        body = {"prompts": [PROMPTS[1]], "tokens_to_generate": 5, "beam_width": 3}
        status, beams = server.ask("PUT", "/api", body)
        assert (status, len(beams["text"]), len(beams["segments"])) == (200, 3, 3)
        assert beams["scores"] == sorted(beams["scores"], reverse=True)
        assert all(text.startswith(PROMPTS[1]) for text in beams["text"])
        status, found = server.ask("PUT", "/api", {**body, "stop_on_eol": True})
        assert (status, found["message"].split()[0]) == (400, "beam_width")
        schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
        schema["additionalProperties"] = False
        patterns = [{"type": "string", "pattern": f".*a.{{{i}}}"} for i in range(30)]
        kinds = [({"schema": schema}, True), ({"schema": {"enum": []}}, False)]
        kinds.append(({"schema": {"allOf": patterns}}, False))  # it needs minutes
        for kind, is_right in kinds:
            status, found = server.ask("POST", "/v1/chat/completions", _with_schema(kind))
            if is_right:
                assert json.loads(found["choices"][0]["message"]["content"])["a"] in (True, False)
            else:
                assert (status, found["error"]["param"]) == (400, "response_format")
        _check_fields_of_vllm(server, expected[0])
        assert server.end() == 0


def _check_fields_of_vllm(server, expected: str) -> None:
    """Check that the engine follows grammars, bad words and allowed tokens of completions."""

    def text_of(**fields: object) -> str:
        body = {"prompt": PROMPTS[0], "max_tokens": NUM_TOKENS, "temperature": 0, **fields}
        status, found = server.ask("POST", "/v1/completions", body)
        assert status == 200, found
        return found["choices"][0]["text"]

    choices = ['a "b"\n', "c d"]
    assert text_of(guided_choice=choices) in choices
    assert text_of(structured_outputs={"choice": choices[1:]}) == choices[1]
    assert text_of(guided_grammar='start: "a" b\nb: "c" | "d"') in ("ac", "ad")
    assert text_of(guided_regex="[xy]{3}") in {a + b + c for a in "xy" for b in "xy" for c in "xy"}
    bad = [expected[:3], expected[5:7].strip() or "x"]
    assert not any(word in text_of(bad_words=bad) for word in bad)
    ids = server.ask("POST", "/tokenize", {"prompt": "a b c", "add_special_tokens": False})[1]
    assert set(text_of(allowed_token_ids=ids["tokens"])) <= set("a b c")
    status, found = server.ask(
        "POST",
        "/v1/completions",
        {"prompt": "a", "guided_regex": "a", "allowed_token_ids": ids["tokens"]},
    )
    assert (status, found["error"]["param"]) == (400, "allowed_token_ids")


def _with_schema(kind: dict[str, object]) -> dict[str, object]:
    form = {"type": "json_schema", "json_schema": kind}
    messages = [{"role": "user", "content": "ab"}]
    return {"messages": messages, "response_format": form, "seed": 1, "max_tokens": 50}


def test_two_ranks_give_the_same_text_and_end_together(checkpoint, other_checkpoint, expected):
    command = [*forked.torchrun(2), TOOL, "--load", str(checkpoint), "--device", "cpu"]
    command += ["--tensor-model-parallel-size", "2", "--port", "0"]
    with started([*command, "--allow-runtime-lora-updating"]) as server:
        assert any(line.startswith("KV cache: ") for line in server.lines)
        assert [_completions(server, prompt) for prompt in PROMPTS] == expected
        status, found = server.ask("POST", "/update_weights", {"load": "/nowhere"})
        assert (status, found["error"]["param"]) == (400, "load")
        assert found["error"]["message"].startswith("load: /nowhere holds no checkpoint")
        status, found = server.ask("POST", "/update_weights", {"load": "a\0b"})
        assert (status, found["error"]["param"]) == (400, "load")
        assert _completions(server, PROMPTS[0]) == expected[0]  # the old weights stay
        status, found = server.ask("POST", "/update_weights", {"load": str(other_checkpoint)})
        assert (status, found) == (200, {"weight_version": 1})
        body = {"lora_name": "a", "lora_path": str(other_checkpoint)}
        status, found = server.ask("POST", "/v1/load_lora_adapter", body)
        assert (status, "holds a complete model, no adapters" in found["message"]) == (400, True)
        body = {"input": [*PROMPTS, PROMPTS[0]], "pooling": "mean"}
        data = server.ask("POST", "/v1/embeddings", body)[1]["data"]
        first, *others, again = (np.array(each["embedding"]) for each in data)
        assert again == pytest.approx(first, abs=1e-5)
        assert [np.linalg.norm(x) for x in (first, *others)] == pytest.approx([1] * len(PROMPTS))
        assert server.ask("POST", "/pause")[0] == server.ask("POST", "/resume")[0] == 200
        (texts,) = run_ranks(_texts, 1, str(other_checkpoint))
        assert [_completions(server, prompt, 1) for prompt in PROMPTS] == texts != expected
        assert server.end() != 0  # of torchrun, after any signal


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_server_ends_with_the_processes_of_its_grammars(
    checkpoint: Path, is_stopped: bool
) -> None:
    pytest.importorskip("llguidance")
    command = [forked.python(), TOOL, "--load", str(checkpoint), "--device", "cpu", "--port", "0"]
    with started(command) as server:
        tasks = Path(f"/proc/{forked.program_of(server.process.pid)}/task")
        children = "".join(path.read_text() for path in tasks.glob("*/children")).split()
        (first,) = [
            int(child)
            for child in children
            if b"grammar_worker" in Path(f"/proc/{child}/cmdline").read_bytes()
        ]
        end = os.pidfd_open(first)
        if is_stopped:
            os.kill(first, signal.SIGSTOP)
        assert server.end() == 0
        assert select.select([end], [], [], TIMEOUT_S)[0]
        os.close(end)


def test_a_missing_checkpoint_is_reported(tmp_path):
    pytest.importorskip("starlette")
    command = [forked.python(), TOOL, "--device", "cpu", "--port", "0"]
    for words, message in (
        (["--load", str(tmp_path)], "CheckpointError"),
        ([], "--load is missing"),
    ):
        done = subprocess.run([*command, *words], capture_output=True, text=True, timeout=TIMEOUT_S)
        assert done.returncode != 0
        assert message in done.stdout + done.stderr
        assert "Traceback" not in done.stderr


def test_a_second_model_needs_the_end_of_the_first(checkpoint, expected):
    assert run_ranks(_texts_of_two_models, 1, str(checkpoint)) == [(expected, expected)]


def _texts_of_two_models(rank: int, world_size: int, folder: str) -> tuple[list[str], list[str]]:
    first = LLM.load(folder, device_kind="cpu")
    with pytest.raises(LaunchError, match=r"call shut_down\(\) of that LLM first"):
        LLM.load(folder, device_kind="cpu")
    texts = _texts_of(first)
    first.shut_down()
    return texts, _texts_of(LLM.load(folder, device_kind="cpu"))

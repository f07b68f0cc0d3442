"""The scripts of examples/inference write the tokens of this project's own tools."""

from __future__ import annotations

import contextlib
import io
import json
import runpy
import subprocess
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megatron.core.inference.sampling_params import SamplingParams
from megatron.inference.engine_flags import engine_options
from megatron.inference.llm import LLM
from megatron.training.arguments.parser import parse_args
from tests.support import forked, selection
from tests.support.ranks import run_ranks
from tests.support.runs import ROOT, TINY, run_gpt

GREEDY = SamplingParams(top_k=1, num_tokens_to_generate=6)
MAMBA = (
    "--model-kind mamba --hybrid-override-pattern M* --mamba-num-groups 2 --mamba-state-dim 8 "
    "--mamba-head-dim 8 --is-hybrid-model --position-embedding-type none --normalization RMSNorm"
).split()
WORDS = "a b c d e f g h i j k l m n o p q r s t u v w x y z".split()
T5 = (
    "--model-kind t5 --decoder-num-layers 2 --decoder-seq-length 24 --vocab-extra-ids 20 "
    "--position-embedding-type relative --tokenizer-type BertWordPieceLowerCase"
).split()


def run_example(rank: int, world: int, name: str, out: str, argv: list[str]) -> dict[str, Any]:
    script = str(ROOT / "examples/inference" / name)
    flags = ["--device", "cpu", "--use-checkpoint-args", "--num-tokens-to-generate", "6"]
    flags += ["--inference-dynamic-batching-buffer-size-gb", "0.01", "--output-path", out]
    with mock.patch("sys.argv", [script, *flags, *argv]):
        runpy.run_path(script, run_name="__main__")
    return json.loads(Path(out).read_text()) if rank == 0 else {}


def own_answers(rank: int, world: int, load: str, prompts: list[str]) -> list[Any]:
    answers = LLM.load(load, device_kind="cpu").generate(prompts, GREEDY)
    return [{"text": a.text, "tokens": [t.token for t in a.tokens]} for a in answers]


def types_of_states(rank: int, world: int, load: str) -> set[tuple[torch.dtype, ...]]:
    """Return the types in which an engine keeps the states of Mamba layers after an answer."""
    flags = "--mamba-inference-conv-states-dtype fp32 --mamba-inference-ssm-states-dtype bf16"
    options = engine_options(parse_args(argv=flags.split()))
    llm = LLM.load(load, device_kind="cpu", options=options)
    assert llm.generate("1 2 3", GREEDY)[0].text
    return {tuple(x.dtype for x in state) for state in llm.engine._runner.cache.states.values()}


def assert_equal(folder: Path, load: str, name: str, argv: list[str], prompts: list[str]) -> None:
    """The script writes the tokens, up to their end, that our own tool writes."""
    ranks = 2 if "2" in argv else 1
    out = str(folder / "answers.json")
    found = run_ranks(run_example, ranks, name, out, ["--load", load, *argv])[0]
    wanted = run_ranks(own_answers, 1, load, prompts)[0]
    ids = [int(request_id) for request_id in found]
    assert ids == list(range(ids[0], ids[0] + len(prompts)))
    for prompt, mine, theirs in zip(prompts, found.values(), wanted, strict=True):
        tokens = mine["generated_tokens"]
        assert mine["input_prompt"] == prompt
        assert mine["generated_text"] == theirs["text"]
        assert tokens[: len(theirs["tokens"])] == theirs["tokens"][: len(tokens)]
        assert len(mine["tpot"]) in (len(tokens), len(tokens) - 1)  # an end token has no text
        assert mine["latency"] > 0


@pytest.fixture(scope="module")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("gpt")
    run_gpt(folder, "--save", str(folder / "ck"), "--lr", "1e-2")
    return str(folder / "ck")


@pytest.mark.feature("Generation: examples/inference in the form of Megatron Core's scripts")
@pytest.mark.parametrize(
    ("name", "axis"),
    selection.first(
        2,
        [
            ("gpt_static_inference.py", "tensor"),
            ("gpt_dynamic_inference.py", "pipeline"),
            ("gpt_static_inference.py", None),
            ("gpt_static_inference.py", "pipeline"),
            ("gpt_dynamic_inference.py", None),
            ("gpt_dynamic_inference.py", "tensor"),
        ],
    ),
)
def test_scripts_for_gpt_write_our_tokens(
    tmp_path: Path, gpt: str, name: str, axis: str | None
) -> None:
    prompts = ["1 2 3", "5", "9 8 7 6 5"]
    argv = ["--prompts", *prompts]
    argv += [f"--{axis}-model-parallel-size", "2"] if axis else []
    argv += ["--stream"] if name.startswith("gpt_static") else []
    assert_equal(tmp_path, gpt, f"gpt/{name}", argv, prompts)


def test_the_script_for_mamba_writes_our_tokens(tmp_path: Path) -> None:
    load = str(tmp_path / "ck")
    run_gpt(tmp_path, *MAMBA, "--save", load)
    prompts = ["1 2 3", "5"]
    argv = ["--prompts", *prompts, "--model-provider", "hybrid"]
    argv += ["--mamba-inference-conv-states-dtype", "fp32"]
    assert_equal(tmp_path, load, "mamba/mamba_static_inference.py", argv, prompts)
    (found,) = run_ranks(types_of_states, 1, load)
    assert found == {(torch.float32, torch.bfloat16)}


def test_the_script_for_t5_writes_our_tokens(tmp_path: Path) -> None:
    vocabulary = tmp_path / "vocab.txt"
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary.write_text("\n".join([*special, *WORDS]) + "\n")
    load = str(tmp_path / "ck")
    run_gpt(tmp_path, *T5, "--vocab-file", str(vocabulary), "--save", load, base=TINY)
    prompts = ["a b <extra_id_0> e f g", "q r"]
    argv = ["--prompts", "", "", "--encoder-prompts", *prompts]
    argv += ["--vocab-file", str(vocabulary)]
    assert_equal(tmp_path, load, "t5/simple_t5_batch_inference.py", argv, prompts)


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--num-input-tokens 8 --inference-max-requests 3", "3 requests, 12 generated tokens"),
        ("--num-input-tokens 8 --engine-type dynamic", "8 requests, 32 generated tokens"),
        ("--prompts 1 --return-log-probs --stream", "1 requests, "),
    ],
)
def test_the_performance_tool_reports_the_tokens_it_generated(
    gpt: str, flags: str, line: str
) -> None:
    tool = [forked.python(), "tools/run_inference_performance_test.py", "--load", gpt]
    asked = ["--device", "cpu", "--num-tokens-to-generate", "4", *flags.split()]
    ended = subprocess.run([*tool, *asked], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.splitlines()[-1].startswith(line)
    assert "tokens/s" in ended.stdout


def test_the_performance_tool_needs_prompts(gpt: str) -> None:
    tool = [forked.python(), "tools/run_inference_performance_test.py", "--load", gpt]
    ended = subprocess.run(tool, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2
    assert "give --prompts TEXT ... or --num-input-tokens N" in ended.stderr


def run_later(rank: int, world: int, name: str, argv: list[str]) -> tuple[str, str]:
    """Return the standard output and the error output of a script on this rank."""
    script = str(ROOT / "examples/inference" / name)
    flags = ["--device", "cpu", "--inference-dynamic-batching-buffer-size-gb", "0.01"]
    said = io.StringIO()
    heard = io.StringIO()
    with (
        mock.patch("sys.argv", [script, *flags, *argv]),
        contextlib.redirect_stdout(said),
        contextlib.redirect_stderr(heard),
    ):
        runpy.run_path(script, run_name="__main__")
    return said.getvalue(), heard.getvalue()


LATER = {  # script -> ranks, own flags, and what it prints then
    "advanced/gpt_static_inference.py": (1, "--inference-max-requests 2", ["engine step 4: 2 "]),
    "advanced/gpt_dynamic_inference.py": (
        1,
        "--incoming-requests-per-step 2 --inference-dynamic-batching-max-requests 3",
        ["engine step 4: 3 requests run, 1 wait"],
    ),
    "advanced/gpt_dynamic_inference_with_coordinator.py": (
        2,
        "--use-coordinator --incoming-requests-per-step 1",
        ["engine step 4: "],
    ),
    "offline_inference.py": (1, "--async-mode --stop-words STOP", ["0 ends: ", "engine step 4: "]),
}


@pytest.mark.feature("Generation: the scripts of later Megatron-LM versions, with their flags")
@pytest.mark.parametrize("name", LATER)
def test_scripts_of_later_versions_follow_their_flags(gpt: str, tmp_path: Path, name: str) -> None:
    prompts = ["1 2 3", "5", "9 8 7 6 5", "4 4"]
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in [*prompts, "1"])
    )
    ranks, own, lines = LATER[name]
    wanted = run_ranks(own_answers, 1, gpt, prompts)[0]
    stop = wanted[0]["text"].split()[2]
    own = own.replace("STOP", stop)
    out = tmp_path / "out.json"
    flags = (
        f"--load {gpt} --prompt-file {tmp_path}/prompts.jsonl --prompt-file-num-truncate 4 "
        f"--num-tokens-to-generate 6 --output-path {out} --output-every-n-results 2 "
        "--inference-repeat-n 2 --inference-logging-step-interval 4 --termination-id -1 "
        f"--inference-ckpt-non-strict --no-inference-dynamic-batching-prefix-caching {own}"
    )
    said = run_ranks(run_later, ranks, name, flags.split())[0][0]
    assert all(line in said for line in lines), said
    assert said.count(" generated tokens/s") == 2  # of each repetition
    written = json.loads(out.read_text())
    assert written.pop("throughput")[0] > 0
    assert len(written) == 2  # every second answer
    for prompt, mine, theirs in zip(prompts[::2], written.values(), wanted[::2], strict=True):
        assert mine["input_prompt"] == prompt
        whole = theirs["text"]
        if "--stop-words" in own:
            whole = whole.partition(stop)[0]
            assert stop not in mine["generated_text"]
        assert mine["generated_text"].startswith(whole)  # theirs ends at the token that ends texts

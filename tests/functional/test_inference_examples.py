"""The scripts of examples/inference write the tokens of this project's own tools."""

from __future__ import annotations

import json
import runpy
import subprocess
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megatron.core.inference.sampling_params import SamplingParams
from megatron.inference.llm import LLM
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
    argv = ["--prompts", *prompts]
    assert_equal(tmp_path, load, "mamba/mamba_static_inference.py", argv, prompts)


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

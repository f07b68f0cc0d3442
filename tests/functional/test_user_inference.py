"""Generation scripts written for Megatron-LM core_v0.14 run as they are, in its eleven test cases.

The cases are those of Megatron-LM's functional tests, with tiny models on CPU ranks; the examples
of this project take the same command lines.  Every answer is compared with that of our own tool on
one process.
"""

from __future__ import annotations

import argparse
import json
import runpy
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch import nn

from examples.inference import common
from megatron.core.config.errors import ConfigError
from megatron.core.inference.sampling_params import SamplingParams
from megatron.inference.llm import LLM
from megatron.training import get_args
from megatron.training.global_vars import get_run
from megatron.training.initialize import initialize_megatron
from megatron.training.training import get_model, setup_model_and_optimizer
from pretrain_gpt import model_provider
from pretrain_mamba import model_provider as mamba_provider
from tests.support import user_inference
from tests.support.ranks import run_ranks
from tests.support.runs import ROOT, run_gpt

PROMPTS = ["1 2 3", "5 6"]
SHAPE = (
    "--device cpu --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --tokenizer-type NullTokenizer --vocab-size 100"
).split()
HYBRID = (
    "--hybrid-override-pattern M* --mamba-num-groups 2 --mamba-state-dim 8 --mamba-head-dim 8 "
    "--is-hybrid-model --position-embedding-type none --normalization RMSNorm"
).split()
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-grouped-gemm --disable-bias-linear "
    "--moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 1e-2"
).split()
MODELS = {"gpt": [], "hybrid": HYBRID, "experts": EXPERTS}
# Of all command lines of Megatron-LM's cases.
USUAL = (
    "--micro-batch-size 1 --use-mcore-models --transformer-impl transformer_engine "
    "--attention-dropout 0.0 --hidden-dropout 0.0 --ckpt-format torch_dist "
    "--ckpt-fully-parallel-save --ckpt-fully-parallel-load --ckpt-assume-constant-structure "
    "--dist-ckpt-strictness log_unexpected --distributed-backend gloo --log-interval 1 "
    "--inference-max-seq-length 32 --max-tokens-to-oom 3600000 --temperature 1.0 --top_k 1 "
    "--return-log-probs --num-tokens-to-generate 6"
).split()
STATIC = "user_static_inference.py"
DYNAMIC = "user_dynamic_inference.py"
BUFFER = "--inference-dynamic-batching-buffer-size-gb 0.01".split()
TP2 = "--tensor-model-parallel-size 2".split()
SP = "--sequence-parallel"
EP4 = "--expert-model-parallel-size 4 --expert-tensor-parallel-size 1".split()
GRAPHS = "--enable-cuda-graph --inference-rng-tracker".split()
MAMBA = ["--model-provider", "mamba"]
# name: script, model, ranks, further flags
CASES: dict[str, tuple[str, str, int, list[str]]] = {
    "static": (STATIC, "gpt", 1, ["--flash-decode"]),
    "static, graphs": (STATIC, "gpt", 1, [*GRAPHS, "--flash-decode"]),
    "static, non-strict, stream": (STATIC, "gpt", 1, ["--inference-ckpt-non-strict", "--stream"]),
    "static, hybrid": (STATIC, "hybrid", 1, [*MAMBA, "--top-n-logprobs", "2"]),
    "static, hybrid, graphs": (STATIC, "hybrid", 1, [*MAMBA, *GRAPHS]),
    "static, experts": (STATIC, "experts", 1, ["--top-n-logprobs", "2"]),
    "static, experts, tp ep": (STATIC, "experts", 4, [*TP2, *EP4, SP]),
    "dynamic": (DYNAMIC, "gpt", 1, BUFFER),
    "dynamic, graphs": (DYNAMIC, "gpt", 1, [*BUFFER, *GRAPHS]),
    "dynamic, tp": (DYNAMIC, "gpt", 2, [*BUFFER, *TP2, SP]),
    "dynamic, file": (DYNAMIC, "gpt", 1, [*BUFFER, "--inference-ckpt-non-strict"]),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    for name, flags in MODELS.items():
        kind = ["--model-kind", "mamba"] if name == "hybrid" else []
        run_gpt(folder, *kind, *flags, "--save", str(folder / name), "--lr", "1e-2")
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"text": p}) + "\n" for p in PROMPTS))
    return {name: str(folder / name) for name in [*MODELS, "prompts.jsonl"]}


@pytest.fixture(scope="module")
def wanted(checkpoints: dict[str, str]) -> dict[str, list[Any]]:
    return {name: run_ranks(own_answers, 1, checkpoints[name])[0] for name in MODELS}


def own_answers(rank: int, world: int, load: str) -> list[Any]:
    """Text, tokens and log-probabilities, those of the prompt first, by our own tool."""
    params = SamplingParams(
        top_k=1, num_tokens_to_generate=6, return_log_probs=True, return_prompt_log_probs=True
    )
    answers = LLM.load(load, device_kind="cpu").generate(PROMPTS, params)
    return [
        (a.text, [t.token for t in a.tokens], [t.log_prob for t in (*a.prompt_scores, *a.tokens)])
        for a in answers
    ]


def run_script(rank: int, world: int, path: str, argv: list[str]) -> None:
    with mock.patch("sys.argv", [path, *argv]):
        runpy.run_path(path, run_name="__main__")


def answers_of(
    script: Path, folder: Path, checkpoints: dict[str, str], case: str, *more: str
) -> list[dict[str, Any]]:
    """Run a script for a case; return the answers that it has written."""
    _, model, world, flags = CASES[case]
    prompts = ["--prompts", *PROMPTS]
    if case.endswith("file"):
        prompts = ["--prompt-file", checkpoints["prompts.jsonl"]]
    out = folder / "answers.json"
    argv = [*SHAPE, *USUAL, *MODELS[model], *flags, *prompts, *more]
    argv += ["--load", checkpoints[model], "--output-path", str(out)]
    run_ranks(run_script, world, str(script), argv)
    found = json.loads(out.read_text())
    first = int(next(iter(found)))
    assert list(found) == [str(first + i) for i in range(len(PROMPTS))], "request id: answer"
    return list(found.values())


def assert_answers(found: list[dict[str, Any]], wanted: list[Any], case: str) -> None:
    for prompt, answer, (text, tokens, log_probs) in zip(PROMPTS, found, wanted, strict=True):
        count = len(answer["generated_tokens"])
        assert answer["input_prompt"] == prompt
        assert answer["generated_text"] == text
        assert answer["generated_tokens"] == tokens[:count]
        assert answer["logprobs"] == pytest.approx(log_probs[: len(answer["logprobs"])], abs=1e-4)
        assert len(answer["logprobs"]) == len(prompt.split()) - 1 + len(answer["tpot"])
        assert answer["latency"] > 0
        if "--top-n-logprobs" in CASES[case][3]:
            assert [len(top) for top in answer["generated_top_n_logprobs"]] == [2] * count


@pytest.mark.feature("Generation: Megatron-LM's static and dynamic example scripts as they are")
@pytest.mark.parametrize("case", CASES)
def test_a_generation_script_gives_our_answers(
    tmp_path: Path, checkpoints: dict[str, str], wanted: dict[str, list[Any]], case: str
) -> None:
    script, model, *_ = CASES[case]
    found = answers_of(ROOT / "tests/support" / script, tmp_path, checkpoints, case)
    assert_answers(found, wanted[model], case)


@pytest.mark.parametrize(
    "case", ["static, hybrid", "static, experts, tp ep", "dynamic, tp", "dynamic, file"]
)
def test_the_examples_take_the_command_lines_of_megatron(
    tmp_path: Path, checkpoints: dict[str, str], wanted: dict[str, list[Any]], case: str
) -> None:
    script, model, *_ = CASES[case]
    example = ROOT / "examples/inference/gpt" / script.replace("user", "gpt")
    assert_answers(answers_of(example, tmp_path, checkpoints, case), wanted[model], case)


def test_the_checkpoint_does_not_change_a_flag_of_the_script(
    tmp_path: Path, checkpoints: dict[str, str], wanted: dict[str, list[Any]]
) -> None:
    script = ROOT / "tests/support" / STATIC
    found = answers_of(script, tmp_path, checkpoints, "static", "--use-checkpoint-args")
    assert_answers(found, wanted["gpt"], "static")


def test_a_script_generates_in_fp8(tmp_path: Path) -> None:
    run_gpt(tmp_path, "--bf16", "--save", str(tmp_path / "ck"), "--lr", "1e-2")
    tokens = []
    for flags in ([], ["--fp8-format", "hybrid", "--fp8-recipe", "tensorwise", *GRAPHS]):
        argv = [*SHAPE, *USUAL, "--bf16", *flags, "--prompts", *PROMPTS]
        argv += ["--load", str(tmp_path / "ck"), "--output-path", str(tmp_path / "out.json")]
        run_ranks(run_script, 1, str(ROOT / "tests/support" / STATIC), argv)
        found = json.loads((tmp_path / "out.json").read_text()).values()
        tokens.append([answer["generated_tokens"] for answer in found])
    assert tokens[0] == tokens[1]


def test_experts_generate_without_the_flag_that_training_needs(
    tmp_path: Path, checkpoints: dict[str, str], wanted: dict[str, list[Any]]
) -> None:
    argv = [*SHAPE, *USUAL, *EXPERTS, *TP2, "--prompts", *PROMPTS]
    argv += ["--load", checkpoints["experts"], "--output-path", str(tmp_path / "out.json")]
    run_ranks(run_script, 2, str(ROOT / "tests/support" / STATIC), argv)
    found = list(json.loads((tmp_path / "out.json").read_text()).values())
    assert_answers(found, wanted["experts"], "static")


def messages(rank: int, world: int, argv: list[str]) -> list[str]:
    """Start without what only training needs; return the errors of what a script then calls."""
    with mock.patch("sys.argv", ["script.py", *argv]):
        initialize_megatron(user_inference.add_flags, {"micro_batch_size": 1})
    args = get_args()
    assert not any("generates" in warning for warning in get_run().config.warnings)
    assert (args.lr, args.train_iters, args.model_provider) == (None, None, "gpt")
    found = []
    for call in (
        lambda: setup_model_and_optimizer(model_provider),
        lambda: get_model(mamba_provider, wrap_with_ddp=False),
    ):
        try:
            call()
        except ConfigError as error:
            found.append(str(error))
    assert isinstance(get_model(model_provider, wrap_with_ddp=False)[0], nn.Module)
    return found


def test_training_flags_are_required_where_a_script_builds_an_optimizer() -> None:
    argv = [*SHAPE, *TP2, *EXPERTS, *BUFFER, "--inference-max-seq-length", "32"]
    for training, provider in run_ranks(messages, 2, argv):
        assert "--lr is required" in training
        assert "--train-iters, --train-samples or --epochs is required" in training
        assert "--tensor-model-parallel-size 2 needs --sequence-parallel: add it" in training
        assert "pretrain_mamba.model_provider: the flags describe GPT" in provider


def given(monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    """Let the examples find these flags."""
    args = common.add_flags(argparse.ArgumentParser()).parse_args(words.split())
    args.seed = 7
    monkeypatch.setattr(common, "get_args", lambda: args)


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ("--prompts 1 --prompt-file FILE", "both give prompts: leave one out"),
        ("--prompt-file nowhere", "--prompt-file nowhere: each line is an object"),
        ("--incoming-requests-per-sec 0", "--incoming-requests-per-sec 0.0: give a number above"),
    ],
)
def test_examples_say_what_is_wrong_with_their_prompts(
    monkeypatch: pytest.MonkeyPatch, flags: str, complaint: str
) -> None:
    given(monkeypatch, flags)
    with pytest.raises(ConfigError, match=complaint):
        common.prompts()


def test_examples_make_prompts_that_arrive_at_random_times(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    times = "--incoming-requests-per-sec 40 --incoming-requests-duration 2"
    given(monkeypatch, f"{times} --num-tokens-to-prompt 2 5")
    made = common.prompts()
    assert made == common.prompts(), "every rank makes the same"
    assert 40 < len(made) < 160
    assert all(0 < before[0] < after[0] < 2 for before, after in pairwise(made))
    assert {len(text.split()) for _, text in made} == {2, 3, 4, 5}
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"text": "1 2", "id": 5}\n{"text": "3"}\n')
    given(monkeypatch, f"--prompt-file {file}")
    assert common.prompts() == [(0.0, "1 2"), (0.0, "3")]
    given(monkeypatch, f"{times} --prompt-file {file} --random-sample-prompts")
    assert {text for _, text in common.prompts()} == {"1 2", "3"}


def test_an_example_generates_while_requests_arrive(
    tmp_path: Path, checkpoints: dict[str, str]
) -> None:
    out = tmp_path / "answers.json"
    argv = [*SHAPE, *USUAL, *BUFFER, "--load", checkpoints["gpt"], "--output-path", str(out)]
    argv += ["--incoming-requests-per-sec", "100", "--incoming-requests-duration", "0.1"]
    argv += ["--prompt-file", checkpoints["prompts.jsonl"], "--random-sample-prompts"]
    example = ROOT / "examples/inference/gpt/gpt_dynamic_inference.py"
    run_ranks(run_script, 1, str(example), argv)
    assert {a["input_prompt"] for a in json.loads(out.read_text()).values()} <= set(PROMPTS)

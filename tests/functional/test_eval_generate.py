"""Answers to prompts during training (--eval-generate)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support import selection
from tests.support.chat_templates import write_chat_tokenizer, write_conversations
from tests.support.ranks import run_ranks
from tests.support.runs import heard, refusal

pytest.importorskip("jinja2")
pytest.importorskip("tokenizers")

BASE = (
    "--device cpu --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 256 "
    "--max-position-embeddings 256 --micro-batch-size 1 --global-batch-size 2 --lr 1e-2 "
    "--lr-decay-style constant --train-iters 3 --hidden-dropout 0 --attention-dropout 0 "
    "--eval-interval 2 --eval-iters 0 --num-workers 0 --position-embedding-type rope --sft "
    "--tokenizer-type HuggingFaceTokenizer --eval-generate-tokens 6"
).split()
LAYOUTS = {
    "TP2": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "PP2": (2, "--pipeline-model-parallel-size 2"),
    "CP2": (2, "--context-parallel-size 2 --sft-alignment 4"),
    "DP2 FSDP": (2, "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_chat_tokenizer(tmp_path_factory.mktemp("generate"))
    write_conversations(folder / "chats.jsonl", 20)
    rows = [
        {"messages": [{"role": "user", "content": "Who?"}]},
        {"prompt": "First Citizen:"},
        {
            "messages": [
                {"role": "user", "content": "Why?"},
                {"role": "assistant", "content": "left out"},
            ]
        },
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def flags_of(folder: Path, *more: str) -> list[str]:
    return [
        *BASE,
        *("--tokenizer-model", str(folder), "--train-data-path", str(folder / "chats.jsonl")),
        *("--data-cache-path", str(folder / "cache")),
        *("--eval-generate", str(folder / "prompts.jsonl"), *more),
    ]


def answers(said: list[str]) -> list[str]:
    start = next(i for i, line in enumerate(said) if line.startswith("prompt 1 of 3"))
    stop = next(i for i, line in enumerate(said) if line.startswith("[after training is done]"))
    return [line for line in said[start:stop] if "elapsed time" not in line]


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[str]:
    ((said, complaint),) = run_ranks(heard, 1, flags_of(folder, "--sft-alignment", "4"))
    assert complaint == ""
    return answers(said)


@pytest.mark.feature("Fine-tuning: --eval-generate prints answers to prompts at each evaluation")
def test_answers_are_printed_at_evaluations_and_at_the_end(alone: list[str]) -> None:
    for step in (2, 3):
        assert f"prompt 1 of 3 at iteration {step}: Who?" in alone
        assert f"prompt 2 of 3 at iteration {step}: First Citizen:" in alone
        assert f"prompt 3 of 3 at iteration {step}: Why?" in alone
    assert sum(line.startswith("answer ") for line in alone) == 6


@pytest.mark.parametrize("name", selection.only(["PP2", "DP2 FSDP"], LAYOUTS))
def test_every_layout_prints_the_answers_of_one_process(
    folder: Path, alone: list[str], name: str
) -> None:
    ranks, layout = LAYOUTS[name]
    flags = flags_of(folder, "--sft-alignment", "4", *layout.split())
    heard_by_rank = run_ranks(heard, ranks, flags)
    assert answers(heard_by_rank[0][0]) == alone


def test_adapters_answer_too(folder: Path) -> None:
    ((said, complaint),) = run_ranks(heard, 1, flags_of(folder, "--lora-rank", "4"))
    assert complaint == ""
    assert len(answers(said)) >= 12


def test_a_wrong_prompt_ends_the_run_before_the_first_step(folder: Path, tmp_path: Path) -> None:
    for row, message in (
        ('{"text": "a"}', "prompt is None; it must be a list of messages"),
        ('{"prompt": "%s"}' % ("word " * 300), "give 1 to 250, so that --seq-length has room"),
        ("", "has no rows: give messages or a prompt in each"),
    ):
        path = tmp_path / "prompts.jsonl"
        path.write_text(row)
        (said,) = run_ranks(refusal, 1, flags_of(folder, "--eval-generate", str(path)))
        assert message in said
        assert "--eval-generate" in said
        assert str(path) in said
        assert "Traceback" not in said

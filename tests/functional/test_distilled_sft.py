"""Packed conversations are distilled: from the teacher itself, and from its store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.functional.test_sft import BASE, flags_of, write_chat_tokenizer, write_conversations
from tests.support import tolerances
from tests.support.ranks import run_ranks
from tests.support.runs import losses, run_gpt, train_gpt

KEYS = ("lm loss", "logits distillation loss", "total loss", "grad-norm")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with tokenizer, conversations, and a fine-tuned teacher."""
    folder = tmp_path_factory.mktemp("sft")
    write_chat_tokenizer(folder)
    write_conversations(folder / "chats.jsonl", 40)
    teacher = ["--seed", "5", "--lr", "0.02", "--save", str(folder / "teacher")]
    run_gpt(folder / "run", *flags_of(folder, 4), *teacher, base=BASE)
    return folder


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[dict[str, Any]]:
    """One process with the teacher beside the student."""
    teach = ["--export-kd-teacher-load", str(folder / "teacher")]
    return run_gpt(folder / "alone", *flags_of(folder, 4), *teach, base=BASE)


def assert_same(found: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    for key in KEYS:
        assert len(losses(wanted, key)) == 3
        torch.testing.assert_close(
            torch.tensor(losses(found, key)),
            torch.tensor(losses(wanted, key)),
            **tolerances.LAYOUT_LOSS,
        )


@pytest.mark.parametrize(
    "layout",
    [
        "--tensor-model-parallel-size 2 --sequence-parallel",
        "--pipeline-model-parallel-size 2",
        "--context-parallel-size 2",
    ],
)
def test_conversations_are_distilled_in_any_layout(
    tmp_path: Path, folder: Path, alone: list[dict[str, Any]], layout: str
) -> None:
    teach = ["--export-kd-teacher-load", str(folder / "teacher"), *layout.split()]
    found = run_gpt(tmp_path, *flags_of(folder, 4), *teach, base=BASE, world_size=2)
    assert_same(found, alone)


def test_conversations_are_distilled_from_a_store(
    tmp_path: Path, folder: Path, alone: list[dict[str, Any]]
) -> None:
    common = [*BASE, *flags_of(folder, 4)]
    save = [
        "--load",
        str(folder / "teacher"),
        "--finetune",
        "--logits-save-dir",
        str(tmp_path / "s"),
    ]
    cut = ["--context-parallel-size", "2"]
    run_ranks(train_gpt, 2, [*common, *save, "--logits-save-dtype", "fp32", *cut])
    load = ["--logits-load-dir", str(tmp_path / "s")]
    for number, layout in enumerate(([], cut)):
        ranks = 2 if layout else 1
        argv = [*flags_of(folder, 4), *load, *layout]
        found = run_gpt(tmp_path / str(number), *argv, base=BASE, world_size=ranks)
        assert_same(found, alone)

"""Runs of pretrain_t5.py: in one process and in stages, into other layouts, and what they write."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megatron.core.inference.sampling_params import SamplingParams
from megatron.inference import LLM
from tests.support import tolerances
from tests.support.ranks import run_ranks
from tests.support.runs import TINY, losses, run_gpt
from tools import text_generation_cli

WORDS = "a b c d e f g h i j k l m n o p q r s t u v w x y z".split()
FLAGS = (
    "--model-kind t5 --decoder-num-layers 3 --decoder-seq-length 24 --lr 1e-2 "
    "--disable-bias-linear --position-embedding-type relative "
    "--tokenizer-type BertWordPieceLowerCase --vocab-extra-ids 20 --make-vocab-size-divisible-by 8 "
    "--calculate-per-token-loss"
).split()
WITHOUT_TOKENIZER = (
    "--model-kind t5 --decoder-num-layers 2 --decoder-seq-length 24 "
    "--position-embedding-type relative"
).split()
STAGES = "--pipeline-model-parallel-size {} --encoder-pipeline-model-parallel-size {}"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A command line with a vocabulary of letters."""
    vocabulary = tmp_path_factory.mktemp("vocabulary") / "vocab.txt"
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary.write_text("\n".join([*special, *WORDS]) + "\n")
    return [*TINY, *FLAGS, "--vocab-file", str(vocabulary)]


def written(rank: int, world_size: int, folder: str) -> str:
    """What tools/text_generation_cli.py prints for a prompt."""
    words = f"--load {folder} --temperature 0 --num-tokens 12 --device cpu".split()
    argv = ["text_generation_cli.py", *words, "--prompt", "a b <extra_id_0> e f g", "--json"]
    with mock.patch.object(sys, "argv", argv), contextlib.redirect_stdout(io.StringIO()) as said:
        text_generation_cli.main()
    return said.getvalue().splitlines()[-1] if rank == 0 else ""


@pytest.mark.feature("Training: pretrain_t5.py, its checkpoints go on in any layout and write text")
def test_stages_train_as_one_process_and_each_goes_on_from_the_other(
    tmp_path: Path, base: list[str]
) -> None:
    def run(name: str, *flags: str, ranks: int = 1) -> list[float]:
        seen: list[dict[str, Any]] = run_gpt(
            tmp_path / name, *flags, base=base, world_size=ranks, timeout_s=120
        )
        return losses(seen)

    whole = run("whole")
    saved = tmp_path / "ck"
    half = ["--exit-interval", "3", "--save", str(saved)]
    first = run("first", *half, *STAGES.format(3, 1).split(), ranks=3)
    close = tolerances.LAYOUT_LOSS
    torch.testing.assert_close(torch.tensor(first), torch.tensor(whole[:3]), **close)
    for name, flags, ranks in (
        ("one", "", 1),
        ("tp", f"--tensor-model-parallel-size 2 --sequence-parallel {STAGES.format(2, 1)}", 4),
    ):
        rest = run(name, "--load", str(saved), *flags.split(), ranks=ranks)
        torch.testing.assert_close(torch.tensor(rest), torch.tensor(whole[3:]), **close)
    answers = [json.loads(run_ranks(written, n, str(saved))[0]) for n in (1, 2)]
    assert answers[0]["tokens"]
    assert answers[0]["tokens"] == answers[1]["tokens"]
    assert "a b" not in answers[0]["text"]  # it answers the prompt, instead of following it


def test_a_tokenizer_without_special_tokens_generates(tmp_path: Path) -> None:
    load = str(tmp_path / "ck")
    run_gpt(tmp_path, *WITHOUT_TOKENIZER, "--save", load)
    (found,) = run_ranks(numbers_after, 1, load)
    assert len(found) == 4


def numbers_after(rank: int, world_size: int, load: str) -> list[str]:
    params = SamplingParams(top_k=1, num_tokens_to_generate=4)
    return LLM.load(load, device_kind="cpu").generate("1 2 3", params)[0].text.split()

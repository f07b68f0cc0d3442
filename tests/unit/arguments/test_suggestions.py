"""Suggestions for flags that do not exist: right, or none."""

from __future__ import annotations

import re

import pytest

from megatron.training.arguments.argument_parser import SYNONYMS, suggestion
from megatron.training.arguments.parser import build_parser

KNOWN = [s for action in build_parser()._actions for s in action.option_strings]


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--resume", "use --load"),
        ("--learning-rate", "use --lr"),
        ("--LEARNING_RATE", "use --lr"),
        ("--batchsize", "use --micro-batch-size (samples of one rank in one pass) or --global-"),
        ("--gradient-accumulation-steps", "use --global-batch-size = --micro-batch-size x "),
        ("--DDP-impl", "use no flag: data parallelism has one implementation"),
        ("--training.seq_len", "use --seq-length"),
        ("--temperature", "use a flag of tools/text_generation_cli.py (megatron-generate)"),
        ("--gpus", "use torchrun's flag --nproc-per-node (megatron-launch)"),
        ("--model-name-or-path", "use --load (a Hugging Face folder, hf://org/name or a "),
        ("--num-train-epochs", "use --epochs"),
        ("--output-dir", "use --save"),
        ("--load_best_model_at_end", "use --save-best"),
        ("--mlflow", "use --tracker mlflow and --tracker-project"),
        ("--fp8", "use --fp8-format"),
        ("--checkpoint", "use --load"),
        ("--torch-compile", "use no flag: kernels are fused"),
        ("--hidden-sise", "did you mean --hidden-size?"),
        ("--num-layer", "did you mean --num-layers?"),
        ("--use-swiglu", "did you mean --swiglu?"),
        ("--pipeline-model-size", "did you mean --pipeline-model-parallel-size?"),
        ("--no-bias-linear", "did you mean --disable-bias-linear?"),
    ],
)
def test_a_flag_of_another_program_or_spelling_is_found(flag: str, words: str) -> None:
    assert suggestion(flag, KNOWN).startswith(f": {words}")


@pytest.mark.parametrize(
    "flag",
    ["--foo", "--xqzzy", "--adam-beta3", "--no-swiglu", "--bf32", "--x", "--"],
)
def test_no_suggestion_is_better_than_a_wrong_one(flag: str) -> None:
    assert suggestion(flag, KNOWN) == ""


def test_the_table_names_flags_that_exist_and_replaces_those_that_do_not() -> None:
    of_torchrun = {"--nproc-per-node", "--nnodes"}
    assert set(re.findall(r"--[a-z][\w-]+", " ".join(SYNONYMS))) <= {*KNOWN, *of_torchrun}
    names = " ".join(SYNONYMS.values()).split()
    assert len(names) == len(set(names))
    assert [name for name in names if f"--{name}" in KNOWN] == []
    assert [name for name in names if name != name.lower() or "_" in name] == []

"""The lines rank 0 prints before training."""

from __future__ import annotations

import re

import pytest

from megatron.training.startup_log import (
    argument_lines,
    print_arguments,
    print_datetime,
    print_layout,
)
from tests.unit.callbacks.helpers import fake_run


def test_arguments_stand_in_alphabetical_order_with_dots_to_column_48() -> None:
    lines = argument_lines({"seq_length": 64, "DDP_bucket_size": None, "bf16": True})
    assert lines == [
        "------------------------ arguments ------------------------",
        "  bf16 ............................................ True",
        "  DDP_bucket_size ................................. None",
        "  seq_length ...................................... 64",
        "-------------------- end of arguments ---------------------",
    ]


def test_only_rank_0_prints_the_arguments(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    print_arguments({"a": 1})
    assert capsys.readouterr().out == ""
    monkeypatch.setenv("RANK", "0")
    print_arguments({"a": 1})
    assert "  a ............................................... 1\n" in capsys.readouterr().out


def test_a_moment_is_printed_with_its_label(capsys: pytest.CaptureFixture[str]) -> None:
    print_datetime("after dataloaders are built")
    assert re.fullmatch(
        r"\[after dataloaders are built\] datetime: \d{4}-\d\d-\d\d \d\d:\d\d:\d\d \n",
        capsys.readouterr().out,
    )


def test_the_layout_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    print_layout(fake_run())
    assert capsys.readouterr().out == (
        "using world size: 1, data-parallel size: 1, context-parallel size: 1, "
        "hierarchical context-parallel sizes: None, tensor-model-parallel size: 1, "
        "pipeline-model-parallel size: 1\n"
        "using torch.float32 for parameters ...\n"
    )

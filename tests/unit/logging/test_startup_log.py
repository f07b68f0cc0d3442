"""The lines rank 0 prints before training."""

from __future__ import annotations

import re

import pytest
import torch

from megatron.core import device
from megatron.core.device import cpu_kernels
from megatron.core.fusions import kernels
from megatron.training.process.rank_print import print_flags
from megatron.training.startup_log import (
    print_arguments,
    print_attention_backends,
    print_datetime,
    print_fused_operations,
    print_layout,
)
from tests.support.callback_calls import run_config
from tests.support.command_lines import run_of


def test_arguments_stand_in_alphabetical_order_with_dots_to_column_48(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_arguments({"seq_length": 64, "DDP_bucket_size": None, "bf16": True})
    assert capsys.readouterr().out.splitlines() == [
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


def test_flags_break_between_words_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "24")
    words = "--qk-layernorm --lr 1e-05 --train-iters 30".split()
    print_flags("of tiny", words)
    assert capsys.readouterr().out == f"> of tiny: {' '.join(words)}\n"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    print_flags("of tiny", words)
    assert capsys.readouterr().out.splitlines() == [
        "> of tiny:",
        "    --qk-layernorm --lr",
        "    1e-05 --train-iters",
        "    30",
    ]


def test_a_moment_is_printed_with_its_label(capsys: pytest.CaptureFixture[str]) -> None:
    print_datetime("after dataloaders are built")
    assert re.fullmatch(
        r"\[after dataloaders are built\] datetime: \d{4}-\d\d-\d\d \d\d:\d\d:\d\d \n",
        capsys.readouterr().out,
    )


def test_the_layout_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    print_layout(run_config())
    assert capsys.readouterr().out == (
        "using world size: 1, data-parallel size: 1, context-parallel size: 1, "
        "hierarchical context-parallel sizes: None, tensor-model-parallel size: 1, "
        "pipeline-model-parallel size: 1\n"
        "using torch.float32 for parameters ...\n"
    )


def test_each_exchange_of_a_divided_sequence_names_what_computes_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = "--context-parallel-size 2 --cp-comm-type p2p a2a allgather p2p --attention-dropout 0"
    config = run_of(words + " --seq-length 128", world_size=2)
    print_attention_backends(config)
    tables = capsys.readouterr().out.split("attention backends with ")[1:]
    chosen = {
        table.split(":")[0]: [line.split()[0] for line in table.splitlines() if "chosen" in line]
        for table in tables
    }
    assert chosen == {"p2p": ["flash"], "a2a": ["blocks"], "allgather": ["flash"]}


@pytest.mark.parametrize(
    ("flags", "name", "reason"),
    [
        ("--window-size 8,0", "flash", "chosen"),
        ("--window-size 8,0", "efficient", "a faster implementation is used"),
        ("--context-parallel-size 2 --cp-comm-type allgather", "flash", "chosen"),
        ("--reset-attention-mask", "flash", "chosen"),
        (
            "--reset-attention-mask --enable-cuda-graph",
            "flash",
            "it supports only causal masks, windows and packed sequences, without bias",
        ),
        (
            "--context-parallel-size 2 --cp-comm-type allgather --softmax-type learnable",
            "plain",
            "chosen",
        ),
        (
            "--multi-latent-attention --position-embedding-type rope --qk-head-dim 128 "
            "--qk-pos-emb-head-dim 64 --kv-lora-rank 64",
            "fused",
            "chosen",
        ),
    ],
)
def test_the_table_of_a_gpu_names_the_kernel_of_windows_and_masks(
    flags: str,
    name: str,
    reason: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = f"{flags} --bf16 --attention-dropout 0 --kv-channels 64 --transformer-impl local"
    config = run_of(words, 2 if "context" in flags else 1)
    with device.simulate_device("cuda"):
        print_attention_backends(config)
    rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()[1:])
    assert rows[name] == reason


@pytest.mark.feature("Kernels: the log says at the start whose kernels compute fused operations")
def test_the_kernels_of_fused_operations_are_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons = iter([None, "triton is not installed"])
    monkeypatch.setattr(kernels, "why_missing", lambda package: next(reasons))
    unsupported_reason = iter([None, "not compiled"])
    monkeypatch.setattr(cpu_kernels, "unsupported_reason", lambda dtype: next(unsupported_reason))
    config = run_of("--swiglu --position-embedding-type rope --bf16")
    print_fused_operations(config)
    print_fused_operations(config)
    monkeypatch.setattr(device, "launches_kernels", lambda where: True)
    print_fused_operations(config)
    print_fused_operations(config)
    assert capsys.readouterr().out.splitlines() == [
        "fused operations: kernels in C++",
        "    fp32 main parameters: each bf16 weight and a 16-bit remainder",
        "fused operations: PyTorch alone: not compiled",
        "fused operations: kernels in Triton",
        "    fp32 main parameters: each bf16 weight and a 16-bit remainder",
        "fused operations: PyTorch alone: triton is not installed",
    ]


def test_a_format_without_kernels_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_kernels, "compiled", lambda: object())
    assert kernels.kernel_backend(torch.bfloat16) == "kernels in C++"
    expected = "PyTorch alone: there are none for torch.float16"
    assert kernels.kernel_backend(torch.float16) == expected


def test_the_attention_of_an_image_encoder_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--model-kind vlm --vision-hidden-size 48 --vision-num-attention-heads 6"
    print_attention_backends(run_config(flags))
    lines = capsys.readouterr().out.splitlines()
    own = lines.index("attention backends:")
    encoder = "attention backends of the image encoder:"
    assert own < lines.index(encoder)

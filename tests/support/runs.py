"""Complete training runs on forked ranks, with the real command line and training loop."""

from __future__ import annotations

import ast
import contextlib
import importlib
import io
import json
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from megatron.core import device
from megatron.core.enums import ModelType
from megatron.core.transformer import activation_offload
from megatron.training.models.registry import model_kind
from megatron.training.training import pretrain
from tests.support import host_gpu
from tests.support.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[2]
TINY = (
    "--device cpu --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 8 --lr 1e-3 "
    "--min-lr 1e-4 --lr-decay-style cosine --train-iters 4 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 100 --hidden-dropout 0 --attention-dropout 0 "
    "--log-interval 1 --eval-interval 1000 --eval-iters 1 --num-workers 0 "
    "--no-create-attention-mask-in-dataloader"
).split()
SIX_STEPS = [*TINY, "--train-iters", "6"]
# The same without the number of steps, for a run whose length is given in samples.
_AT = TINY.index("--train-iters")
ANY_LENGTH = TINY[:_AT] + TINY[_AT + 2 :]
# Flags of a run that stays on the host where `tests.support.host_gpu` has a device: it is compared
# with programs or virtual ranks, which do not use the device.
ON_HOST = ["--device", "cpu"]


def run_gpt(
    folder: Path, *flags: str, world_size: int = 1, base: Sequence[str] = TINY, **options: Any
) -> list[dict[str, Any]]:
    """Train on ``world_size`` ranks; return the metrics of the run, one dict per line."""
    folder.mkdir(parents=True, exist_ok=True)
    metrics = folder / "metrics.jsonl"
    argv = [*base, "--metrics-file", str(metrics), *flags]
    run_ranks(train_gpt, world_size, argv, **options)
    return [json.loads(line) for line in metrics.read_text().splitlines()]


def train_gpt(rank: int, world_size: int, argv: Sequence[str]) -> None:
    """Run pretrain_gpt.py, or the entry script of --model-kind, on initialized process groups.

    With --optimizer-cpu-offload or --cpu-offloading, host memory counts as separate from device
    memory, as on a GPU, and small activations are offloaded too.
    """
    is_on_host = "--virtual-ranks" in argv or argv[-2:] == ON_HOST
    argv = [*argv, "--device", "cuda"] if host_gpu.is_asked() and not is_on_host else argv
    kind = argv[argv.index("--model-kind") + 1] if "--model-kind" in argv else "gpt"
    entry = entry_of(kind)
    script = model_kind(kind).entry_script
    with (
        mock.patch("sys.argv", [script, *argv]),
        _host_apart(argv),
    ):
        pretrain(
            entry.train_valid_test_datasets_provider,
            entry.model_provider,
            ModelType.encoder_or_decoder,
            entry.forward_step,
            args_defaults=defaults_of(script),
        )


def entry_of(kind: str | None) -> Any:
    """Import the entry script of a model kind."""
    script = model_kind(kind).entry_script
    return importlib.import_module(script.removesuffix(".py").replace("/", "."))


@contextlib.contextmanager
def _host_apart(argv: Sequence[str]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if {
            "--optimizer-cpu-offload",
            "--cpu-offloading",
            "--fine-grained-activation-offloading",
        } & set(argv):
            stack.enter_context(mock.patch.object(device, "host_is_apart", return_value=True))
            stack.enter_context(mock.patch.object(activation_offload, "MIN_BYTES", 1))
        yield


@cache
def defaults_of(entry: str) -> dict[str, Any]:
    """Return the ``args_defaults`` that an entry script passes to `pretrain`."""
    calls = ast.walk(ast.parse((ROOT / entry).read_text()))
    (found,) = (
        keyword.value
        for call in calls
        if isinstance(call, ast.Call)
        for keyword in call.keywords
        if keyword.arg == "args_defaults"
    )
    defaults: dict[str, Any] = ast.literal_eval(found)
    return defaults


def run_gpt_in_virtual_ranks(
    folder: Path, *flags: str, ranks: int = 4
) -> tuple[list[dict[str, Any]], str]:
    """Train on ranks that are threads of one process; return the metrics and stdout."""
    folder.mkdir(parents=True, exist_ok=True)
    metrics = folder / "metrics.jsonl"
    argv = [*TINY, "--metrics-file", str(metrics), "--virtual-ranks", str(ranks), *flags]
    (said,) = run_ranks(_train_in_virtual_ranks, 1, argv)
    return [json.loads(line) for line in metrics.read_text().splitlines()], said


def _train_in_virtual_ranks(rank: int, world_size: int, argv: Sequence[str]) -> str:
    dist.destroy_process_group()  # as without a launcher
    with contextlib.redirect_stdout(io.StringIO()) as said:
        train_gpt(0, 1, argv)
    return said.getvalue()


def losses(metrics: Sequence[dict[str, Any]], key: str = "lm loss") -> list[float]:
    """Return the training losses in order."""
    return [line[key] for line in metrics if key in line]


def without_times(metrics: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the metrics without durations, which differ between runs."""
    timed = ("time", "interval")
    return [{k: v for k, v in line.items() if not k.endswith(timed)} for line in metrics]


def heard(rank: int, world_size: int, argv: Sequence[str]) -> tuple[list[str], str]:
    """Return what a run prints: the lines of stdout, and stderr with the error that ends it."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        complaint = refusal(rank, world_size, argv)
    return said.getvalue().splitlines(), complaint


def refusal(rank: int, world_size: int, argv: Sequence[str]) -> str:
    """Return the error messages (stderr) of a run that cannot start."""
    with contextlib.redirect_stderr(io.StringIO()) as heard, contextlib.suppress(SystemExit):
        train_gpt(rank, world_size, argv)
    return heard.getvalue()

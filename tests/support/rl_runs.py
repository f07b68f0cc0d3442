"""Runs of pretrain_rl.py on forked ranks, with environments for tests."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pretrain_rl
from tests.support import host_gpu
from tests.support.ranks import run_ranks
from tests.support.runs import without_times

TINY = (
    "--device cpu --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 12 "
    "--max-position-embeddings 12 --position-embedding-type rope --micro-batch-size 2 "
    "--global-batch-size 8 --lr 5e-3 --min-lr 5e-3 --lr-decay-style constant --train-iters 6 "
    "--tokenizer-type NullTokenizer --vocab-size 20 --hidden-dropout 0 --attention-dropout 0 "
    "--log-interval 1 --eval-iters 0 --no-create-attention-mask-in-dataloader "
    "--grpo-prompts-per-step 4 --grpo-group-size 4 --grpo-iterations 1 --grpo-kl-beta 0 "
    "--grpo-clamp-eps-lower 0.2 --grpo-clamp-eps-upper 0.2 --rl-max-response-length 4"
).split()

ECHO = [{"agent_type": "tests.support.rl_environments:Echo"}]


def run_rl(
    folder: Path,
    *flags: str,
    world_size: int = 1,
    env: object = None,
    program: Callable[..., None] | None = None,
    **options: Any,
) -> list[dict[str, Any]]:
    """Train on ``world_size`` ranks; return the metrics of the run, one dict per line.

    ``program``: of each rank, `train_rl` by default.
    """
    folder.mkdir(parents=True, exist_ok=True)
    metrics = folder / "metrics.jsonl"
    environments = folder / "environments.yaml"
    environments.write_text(json.dumps(env or ECHO))  # JSON is YAML
    argv = [*TINY, "--langrl-env-config", str(environments), "--metrics-file", str(metrics)]
    run_ranks(program or train_rl, world_size, [*argv, *flags], **options)
    return [json.loads(line) for line in metrics.read_text().splitlines()]


def refusal_of_rl(folder: Path, *flags: str) -> str:
    """Return the error messages (stderr) of a run on one rank that ends with one."""
    environments = folder / "environments.yaml"
    folder.mkdir(parents=True, exist_ok=True)
    environments.write_text(json.dumps(ECHO))
    argv = [*TINY, "--langrl-env-config", str(environments), *flags]
    (heard,) = run_ranks(_heard, 1, argv)
    return str(heard)


def _heard(rank: int, world_size: int, argv: Sequence[str]) -> str:
    with contextlib.redirect_stderr(io.StringIO()) as heard, contextlib.suppress(SystemExit):
        train_rl(rank, world_size, argv)
    return heard.getvalue()


def train_rl(rank: int, world_size: int, argv: Sequence[str]) -> None:
    """Run pretrain_rl.py on initialized process groups."""
    if host_gpu.is_asked() and world_size == 1:  # gloo sends no tensors of a GPU
        argv = [*argv, "--device", "cuda"]
    with mock.patch("sys.argv", ["pretrain_rl.py", *argv]):
        pretrain_rl.main()


def numbers(metrics: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the metrics without durations and speeds."""
    return [
        {key: value for key, value in line.items() if not key.endswith("tokens/s")}
        for line in without_times(metrics)
    ]

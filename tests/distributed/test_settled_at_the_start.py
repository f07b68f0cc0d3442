"""What a run settles once it knows its machine: chunks of the loss, flags that need a GPU."""

from __future__ import annotations

import contextlib
import io
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron.core import device
from megatron.training.initialize import configure, start
from tests.support.ranks import run_ranks
from tests.support.runs import TINY

WORDS = (
    "--tensor-model-parallel-size 2 --seq-length 512 --max-position-embeddings 512 "
    "--micro-batch-size 8"
)


def chunk_size(rank: int, world_size: int) -> int | None:
    """Where one of them has less memory."""
    config = configure(argv=[*TINY, *WORDS.split(), "--vocab-size", "40000"])
    with mock.patch.object(device, "total_memory", return_value=3_200_000_000 - rank * 200_000_000):
        run = start(config)
    return run.config.model.loss_chunk_size


def test_ranks_of_unequal_memory_cut_the_loss_alike():
    one, other = run_ranks(chunk_size, 2)
    assert one == other == 3_000_000_000 // 100 // (4 * 40_192 // 2)


def said_at_the_start(rank: int, world_size: int, words: str) -> str:
    """What is printed."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        start(configure(argv=[*TINY, *words.split()]))
    return out.getvalue()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to be found")
def test_flags_that_need_a_gpu_say_so_where_none_is_found():
    words = "--enable-cuda-graph --record-memory-history --device"
    for kind in ("auto", "cpu"):
        (said,) = run_ranks(said_at_the_start, 1, f"{words} {kind}")
        for flag in ("--enable-cuda-graph", "--record-memory-history"):
            assert said.count(f"WARNING: {flag} is without effect: it needs a GPU") == 1


def backend_without_a_gpu(rank: int, world_size: int) -> tuple[str, str]:
    """What is printed, and the backend of the default group."""
    dist.destroy_process_group()  # as where no launcher is
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        start(configure(argv=[*TINY, "--distributed-backend", "nccl", "--device", "auto"]))
    return out.getvalue(), dist.get_backend()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to be found")
def test_a_script_that_names_nccl_runs_on_a_machine_without_gpus():
    ((said, backend),) = run_ranks(backend_without_a_gpu, 1)
    assert said.count("WARNING: --distributed-backend nccl is without effect: no GPU") == 1
    assert backend == "gloo"

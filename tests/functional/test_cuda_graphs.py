"""Replayed layers give the bits of layers that Python runs, in every schedule."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from threading import Event, Thread
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron.core import device
from megatron.core.pipeline_parallel.executor import Executor
from megatron.core.tensor_parallel import random
from megatron.core.transformer import cuda_graphs
from tests.support import host_gpu, selection, tolerances
from tests.support.graph_stand_in import graphs_on_cpu
from tests.support.ranks import run_ranks
from tests.support.runs import TINY, train_gpt

GRAPHS = ("--external-cuda-graph", "--cuda-graph-warmup-steps", "1")
SHORT = ("--num-layers", "4", "--train-iters", "3", "--eval-iters", "0", "--bf16")
DROPOUT = ("--hidden-dropout", "0.1", "--attention-dropout", "0.1")
WHOLE = ("--cuda-graph-scope", "full_iteration", "--no-check-for-nan-in-loss-and-grad")
PIPELINE = ("--pipeline-model-parallel-size", "2")
MAMBA = (
    *("--model-kind", "mamba", "--mamba-state-dim", "8", "--mamba-head-dim", "8"),
    *("--mamba-num-groups", "1", "--hidden-dropout", "0.1"),
)
on_a_cpu = pytest.mark.skipif(
    host_gpu.is_asked(), reason="the stand-in for graphs records operations of a CPU"
)
# Ranks, captured layers of each, micro-batches of each, flags.
CASES: dict[str, tuple[int, int, int, tuple[str, ...]]] = {
    "alone": (1, 4, 4, (*DROPOUT, "--swiglu", "--position-embedding-type", "rope")),
    "attention": (1, 4, 4, (*DROPOUT, "--cuda-graph-scope", "attn", "--num-experts", "2")),
    "experts": (1, 4, 4, (*DROPOUT, "--num-experts", "2", "--moe-layer-freq", "[0,1,0,0]")),
    "hybrid": (1, 3, 4, (*MAMBA, "--num-experts", "2", "--hybrid-override-pattern", "M*-E")),
    "attention of a hybrid": (
        *(1, 1, 4),
        (*MAMBA, "--hybrid-override-pattern", "M*-M", "--cuda-graph-scope", "attn"),
    ),
    "step of a hybrid": (
        *(1, 4, 4),
        (*MAMBA, *WHOLE, "--hybrid-override-pattern", "M*-M"),
    ),
    "1f1b": (
        4,
        2,
        2,
        (
            *(*PIPELINE, *DROPOUT, "--use-distributed-optimizer"),
            *("--overlap-grad-reduce", "--overlap-param-gather"),
        ),
    ),
    "interleaved": (2, 2, 4, (*PIPELINE, "--num-layers-per-virtual-pipeline-stage", "1")),
    "context": (2, 4, 4, ("--context-parallel-size", "2")),
    "step": (
        *(1, 4, 4),
        (*WHOLE, *DROPOUT, "--swiglu", "--position-embedding-type", "rope"),
    ),
    "t5": (
        *(1, 4, 4),
        (
            *(*WHOLE, "--model-kind", "t5", "--vocab-extra-ids", "10"),
            *("--encoder-seq-length", "32", "--decoder-seq-length", "16"),
        ),
    ),
    "ranks": (
        *(4, 4, 2),
        (
            *(*WHOLE, *DROPOUT, "--tensor-model-parallel-size", "2", "--sequence-parallel"),
            *("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"),
            *("--calculate-per-token-loss", "--eval-iters", "1", "--eval-interval", "2"),
        ),
    ),
    "sequence": (2, 4, 4, ("--tensor-model-parallel-size", "2", "--sequence-parallel", *DROPOUT)),
}


def trained(rank: int, world_size: int, argv: Sequence[str]) -> tuple[int, int]:
    """Graphs and replays; they were recorded between steps and are gone before groups are."""
    run, destroy, record = Executor.run, dist.destroy_process_group, cuda_graphs.record
    running = []

    def watched_run(executor: Executor, plan: Any) -> Any:
        running.append(plan)
        result = run(executor, plan)
        running.pop()
        return result

    def watched_record(*args: Any, **kwargs: Any) -> Any:
        assert not running, "the device may wait for another stage"
        return record(*args, **kwargs)

    def watched_destroy() -> None:
        assert not graphs.living, "NCCL would wait for them"
        destroy()

    with (
        graphs_on_cpu() as graphs,
        mock.patch.object(Executor, "run", watched_run),
        mock.patch.object(cuda_graphs, "record", watched_record),
        mock.patch.object(dist, "destroy_process_group", watched_destroy),
    ):
        train_gpt(rank, world_size, argv)
        return graphs.graphs, graphs.replays


def metrics(
    folder: Path, ranks: int, *flags: str, run: Any = trained
) -> tuple[list[Any], list[Any]]:
    folder.mkdir()
    path = folder / "metrics.jsonl"
    found = run_ranks(run, ranks, [*TINY, *SHORT, "--metrics-file", str(path), *flags])
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [(x["lm loss"], x["grad-norm"]) for x in lines if "grad-norm" in x], found


DEFAULT = (
    "step of a hybrid",
    "1f1b",
    "context",
    "experts",
)  # of `make test`


@pytest.mark.feature("Speed: layers replayed as CUDA graphs, 1F1B and interleaved, the same bits")
@pytest.mark.feature("Speed: forward and backward of a whole step as one CUDA graph, the same bits")
@on_a_cpu
@pytest.mark.parametrize("name", selection.only(DEFAULT, CASES))
def test_replayed_layers_train_as_layers_that_python_runs(tmp_path: Path, name: str) -> None:
    ranks, layers, micro_batches, flags = CASES[name]
    eager, nothing = metrics(tmp_path / "eager", ranks, *flags)
    # The host judges step 2 while it queues step 3.
    graphed, found = metrics(tmp_path / "graphed", ranks, *flags, *GRAPHS, "--log-interval", "3")
    assert nothing == [(0, 0)] * ranks
    assert graphed == eager
    for rank, (graphs, replays) in enumerate(found):
        if "full_iteration" in flags:
            assert (graphs, replays) == (1, 2)
            continue
        assert replays == 2 * layers * micro_batches * 2, "forward and backward, in two steps"
        in_flight = 2 if name == "1f1b" and rank < 2 else 1  # its first stage
        assert name == "interleaved" or graphs == 2 * layers * in_flight


def with_stale_inputs(rank: int, world_size: int, argv: Sequence[str]) -> None:
    with mock.patch.object(cuda_graphs, "_put"):
        trained(rank, world_size, argv)


def with_one_recording(rank: int, world_size: int, argv: Sequence[str]) -> None:
    choose = cuda_graphs.LayerGraphs.recording

    def first(graphs: Any, hidden: Any, shared: Any) -> Any:
        return graphs._recordings[0] if graphs._recordings else choose(graphs, hidden, shared)

    with mock.patch.object(cuda_graphs.LayerGraphs, "recording", first):
        trained(rank, world_size, argv)


@on_a_cpu
@pytest.mark.parametrize("broken", [with_stale_inputs, with_one_recording])
def test_memory_of_another_micro_batch_is_noticed(tmp_path: Path, broken: Any) -> None:
    eager, _ = metrics(tmp_path / "eager", 2, *PIPELINE)
    wrong, _ = metrics(tmp_path / "wrong", 2, *PIPELINE, *GRAPHS, run=broken)
    assert wrong[0] == eager[0], "the step before the recording"
    assert wrong[1] != eager[1]


@pytest.mark.parametrize("name", CASES)
def test_graphs_of_a_gpu_train_alike(tmp_path: Path, name: str) -> None:
    ranks, *_, flags = CASES[name]
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    on_gpu = (*flags, "--device", "cuda")
    eager, _ = metrics(tmp_path / "eager", ranks, *on_gpu, run=train_gpt)
    graphed, _ = metrics(tmp_path / "graphed", ranks, *on_gpu, *GRAPHS, run=train_gpt)
    allowed = tolerances.LAYOUT[torch.bfloat16]  # kernels add up in an order of their own
    for (loss, norm), (expected_loss, expected_norm) in zip(graphed, eager, strict=True):
        assert loss == pytest.approx(expected_loss, rel=allowed["loss"])
        assert norm == pytest.approx(expected_norm, rel=allowed["norm"])


def draw_in_a_graph(rank: int, world_size: int) -> None:
    """Numbers of a graph are those of Python, while another thread pins memory and copies."""
    where = device.choose("cuda")
    device.leave_default_stream()
    random.model_parallel_seed(1, tp_rank=0, capturable=True)
    tracker, ones, done = random.get_rng_tracker(), torch.ones(1000, device=where), Event()

    def meanwhile() -> None:
        while not done.is_set():
            torch.ones(1 << 16).pin_memory().to(where, non_blocking=True)

    def draw() -> Tensor:
        with tracker.fork():
            named = F.dropout(ones)
        return torch.stack((named, F.dropout(ones)))

    states, own = tracker.get_states(), device.rng_state()
    expected = [draw() for _ in range(3)]
    tracker.set_states(states)
    device.set_rng_state(own)
    graph = device.Graph(device.graph_pool(), tracker.streams())
    thread = Thread(target=meanwhile)
    thread.start()
    with device.about_to_record(), graph.recording():
        found = draw()
    done.set()
    thread.join()
    for numbers in expected:
        graph.replay()
        assert found.equal(numbers)


def test_a_graph_of_a_gpu_draws_what_python_draws() -> None:
    if torch.cuda.device_count() < 1:
        pytest.skip("needs a GPU")
    run_ranks(draw_in_a_graph, 1)

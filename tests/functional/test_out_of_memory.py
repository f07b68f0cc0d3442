"""A run that has not enough memory says who holds it and what would help, and ends on all ranks."""

from __future__ import annotations

import re
import resource
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn import functional as F

from megatron.core.config.errors import OutOfMemory
from megatron.training.planning import out_of_memory
from megatron.training.planning.memory_warmup import make_optimizer_state
from megatron.training.planning.out_of_memory import LOGITS, owners
from megatron.training.process.exit_report import current_phase, in_phase
from tests.support.callback_calls import fake_run
from tests.support.ranks import run_ranks
from tests.support.runs import TINY, refusal

LARGE = "--vocab-size 40000 --seq-length 512 --max-position-embeddings 512 --micro-batch-size 8"
LOGITS_GIB = 8 * 512 * 40_064 * 4 / 2**30


def confined(rank: int, world_size: int, argv: list[str], room: int) -> str:
    """What a run says whose address space may grow by ``room`` bytes."""
    torch.ones(64, 64) @ torch.ones(64, 64)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + room, resource.RLIM_INFINITY))
    return refusal(rank, world_size, argv)


@pytest.mark.feature("Memory: a run without enough says who holds it and what helps")
def test_logits_that_do_not_fit_are_named_with_their_cure() -> None:
    (said,) = run_ranks(confined, 1, [*TINY, *LARGE.split()], 500 * 2**20)
    head, *lines = said[said.index("OutOfMemory: ") :].splitlines()
    assert head == (
        "OutOfMemory: rank 0 is out of memory in step 1, forward pass: an allocation of "
        f"{LOGITS_GIB:.3f} GiB failed"
    )
    assert "fused_linear_cross_entropy.py" in lines[0]
    sizes = {name: float(gib) for gib, name in re.findall(r"^ +([\d.]+)  (\S.*)$", said, re.M)}
    assert any(name.startswith("parameters of embedding.word_embeddings") for name in sizes)
    assert any(name.startswith("activations of decoder.layers.*.mlp.linear_fc2") for name in sizes)
    flags = said[said.index("what would help, the cheapest first:") :].splitlines()
    assert {"  --loss-chunk-size 1024", "  --micro-batch-size 4"} < {*flags}
    assert "--check-only --check-world-size 1 --check-device-memory-gib" in flags[-1]


def test_all_ranks_end_and_name_the_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAULTS", "evaluate.iter:oom:rank1")
    with pytest.raises(AssertionError, match="rank 0.*exit code 1|rank 1.*exit code 1"):
        run_ranks(refusal, 2, [*TINY, "--eval-interval", "2"])


def run_with_one_layer() -> Any:
    layer = torch.nn.Linear(64, 32, bias=False)
    optimizer = mock.Mock(tensors_by_kind=mock.Mock(return_value=()))
    return fake_run(model_chunks=[torch.nn.ModuleDict({"layer": layer})], optimizer=optimizer)


def test_what_autograd_keeps_belongs_to_the_module_that_reads_it() -> None:
    run = run_with_one_layer()
    layer = run.model_chunks[0]["layer"]
    hidden = layer(torch.ones(1024, 64))
    loss = F.gelu(layer(F.gelu(hidden.repeat(1, 2)))).sum()
    found = {f"{o.kind} {o.name}": o.num_bytes for o in owners(run)}
    assert found["parameters layer.weight"] == 64 * 32 * 4
    assert found["activations layer Gelu"] == 1024 * 64 * 4, "before the layer that reads it"
    loss.backward()
    found = {f"{o.kind} {o.name}": o.num_bytes for o in owners(run)}
    assert found["gradients layer.weight"] == 64 * 32 * 4
    assert "activations layer Gelu" not in found
    assert LOGITS not in " ".join(found)


@pytest.mark.parametrize(
    ("error", "size"),
    [
        (RuntimeError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has"), 5 * 2**29),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes. "
                      "Error code 12"), 64),
        (MemoryError("Unable to allocate 3.00 MiB for an array with shape (1,)"), 3 * 2**20),
        (RuntimeError("std::bad_alloc"), None),
    ],
)  # fmt: skip
def test_failed_allocations_are_known_by_their_words(error: Exception, size: int | None) -> None:
    assert out_of_memory.is_lack_of_memory(error)
    assert out_of_memory.asked_bytes(error) == size


def test_state_of_an_optimizer_that_does_not_fit_is_called_so() -> None:
    run = run_with_one_layer()
    run.optimizer = mock.Mock(named_state=mock.Mock(side_effect=MemoryError()))
    with pytest.raises(MemoryError) as found:
        make_optimizer_state(run)
    head, *_ = out_of_memory._circumstances(run, found.value)
    assert "allocating the optimizer state: an allocation failed" in head


def test_other_errors_pass_through() -> None:
    run = run_with_one_layer()
    with pytest.raises(RuntimeError, match="shapes"), out_of_memory.report_oom(lambda: run):
        raise RuntimeError("shapes cannot be multiplied")
    told = OutOfMemory("told already")
    with pytest.raises(OutOfMemory) as found, out_of_memory.report_oom(lambda: run):
        raise told
    assert found.value is told


def test_the_phase_of_a_failure_is_the_innermost_that_has_begun() -> None:
    run = run_with_one_layer()

    @in_phase("gradient reduction")
    def inner(run: Any, fails: bool) -> None:
        assert current_phase() == "gradient reduction"
        if fails:
            raise MemoryError

    @in_phase("forward and backward passes")
    def outer(run: Any, fails: bool) -> None:
        inner(run, fails)
        assert current_phase() == "forward and backward passes"

    before = current_phase()
    outer(run, False)
    assert current_phase() == before
    with pytest.raises(MemoryError) as found:
        outer(run, True)
    assert "in step 1, gradient reduction: " in next(out_of_memory._circumstances(run, found.value))

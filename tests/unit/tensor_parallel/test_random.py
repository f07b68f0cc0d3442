"""Named random streams, and recomputation that replays them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from megatron.core import device
from megatron.core.tensor_parallel import random
from megatron.core.tensor_parallel.random import (
    CheckpointWithoutOutput,
    checkpoint,
    get_rng_tracker,
    model_parallel_seed,
)


@pytest.fixture(autouse=True)
def seeded() -> None:
    model_parallel_seed(11, tp_rank=0)


def test_a_stream_continues_where_it_stopped_and_disturbs_no_other() -> None:
    tracker = get_rng_tracker()
    state = torch.get_rng_state()
    with tracker.fork():
        first = torch.rand(3)
    assert torch.equal(torch.get_rng_state(), state)
    with tracker.fork():
        second = torch.rand(3)
    model_parallel_seed(11, tp_rank=0)
    with tracker.fork():
        both = torch.rand(6)
    assert torch.equal(both, torch.cat([first, second]))


def test_ranks_share_the_default_stream_and_not_the_model_parallel_one() -> None:
    drawn = []
    for rank in (0, 1):
        model_parallel_seed(11, tp_rank=rank)
        with get_rng_tracker().fork():
            mine = torch.rand(4)
        drawn.append((torch.rand(4), mine))
    assert torch.equal(drawn[0][0], drawn[1][0])
    assert not torch.equal(drawn[0][1], drawn[1][1])


def test_saved_states_bring_a_stream_back() -> None:
    tracker = get_rng_tracker()
    states = tracker.get_states()
    with tracker.fork(random.EXPERT_PARALLEL_STREAM):
        first = torch.rand(3)
    tracker.set_states(states)
    with tracker.fork(random.EXPERT_PARALLEL_STREAM):
        assert torch.equal(torch.rand(3), first)


def test_two_streams_may_not_share_a_seed_or_a_name() -> None:
    tracker = get_rng_tracker()
    with pytest.raises(AssertionError, match="seed 11 is taken"):
        tracker.add("another", 11)
    with pytest.raises(AssertionError, match="exists"):
        tracker.add(random.MODEL_PARALLEL_STREAM, 99)
    with pytest.raises(AssertionError, match="no random stream nobody"), tracker.fork("nobody"):
        pass


def noisy(x: Tensor, weight: Tensor) -> Tensor:
    with get_rng_tracker().fork():
        x = F.dropout(torch.tanh(x @ weight), 0.3)
    return F.dropout(x, 0.3) @ weight


def gradients(run: object) -> tuple[Tensor, ...]:
    model_parallel_seed(11, tp_rank=0)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 4, generator=generator, requires_grad=True)
    weight = torch.randn(4, 4, generator=generator, requires_grad=True)
    out = run(x, weight)  # type: ignore[operator]
    after = torch.rand(1)
    (out * torch.linspace(0, 1, 20).view(5, 4)).sum().backward()
    assert x.grad is not None
    assert weight.grad is not None
    return out.detach(), x.grad, weight.grad, after, torch.rand(1)


def test_a_checkpoint_gives_the_same_bits_and_leaves_the_streams_alone() -> None:
    expected = gradients(noisy)
    found = gradients(lambda x, w: checkpoint(noisy, False, x, w))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def two_results(x: Tensor, weight: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    y = F.dropout(x @ weight, 0.4)
    return y.sin() * factor, F.dropout(y, 0.2).square()


@pytest.mark.parametrize("frozen", [None, "x", "weight"])
def test_a_checkpoint_is_torchs(
    frozen: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # torch's would set it

    def run(kind: str) -> list[Tensor | None]:
        torch.manual_seed(2)
        tensors = {name: torch.randn(3, 3) for name in ("x", "weight")}
        for name, tensor in tensors.items():
            tensor.requires_grad_(name != frozen)
        if kind == "torch":
            a, b = torch_checkpoint(two_results, *tensors.values(), 2.0, use_reentrant=True)
        else:
            a, b = checkpoint(two_results, False, *tensors.values(), 2.0)
        (a * b + a).sum().backward()
        return [a, b, *(t.grad for t in tensors.values()), torch.rand(1)]

    for ours, theirs in zip(run("ours"), run("torch"), strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.equal(ours, theirs)


def test_a_checkpoint_reaches_parameters_behind_a_frozen_input() -> None:
    weight = torch.ones(2, 2, requires_grad=True)
    out = checkpoint(lambda x: x @ weight, False, torch.ones(1, 2))
    out.sum().backward()
    assert weight.grad is not None


def test_a_checkpoint_hands_a_parameter_on_and_leaves_it_a_leaf() -> None:
    weight, bias = torch.ones(2, 2, requires_grad=True), torch.nn.Parameter(torch.ones(2))
    for _ in range(2):
        out, later = checkpoint(lambda x: (x @ weight, bias), False, torch.ones(1, 2))
        (out + later).sum().backward()
    assert bias.is_leaf
    assert torch.equal(bias.grad, torch.full((2,), 2.0))
    assert torch.equal(weight.grad, torch.full((2, 2), 2.0))


def test_a_dropped_output_reaches_parameters_behind_a_frozen_input() -> None:
    weight = torch.ones(2, 2, requires_grad=True)
    memory = CheckpointWithoutOutput()
    out = memory.checkpoint(lambda x: x @ weight, torch.ones(1, 2)).square()
    memory.discard_output_and_register_recompute(out)
    out.sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [[4.0, 4.0], [4.0, 4.0]]


def test_a_dropped_output_has_no_memory_until_backward_and_the_same_gradient() -> None:
    def run(x: Tensor, weight: Tensor, *, drop: bool) -> Tensor:
        memory = CheckpointWithoutOutput()
        y = memory.checkpoint(noisy, x, weight) if drop else noisy(x, weight)
        z = y.square()
        if drop:
            memory.discard_output_and_register_recompute(z)
            assert y.untyped_storage().nbytes() == 0
        return z.sin()

    expected = gradients(lambda x, w: run(x, w, drop=False))
    found = gradients(lambda x, w: run(x, w, drop=True))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


class _OwnGenerator:
    """The default generator of a GPU, which is not the host's; `torch.manual_seed` seeds both."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._states = torch.Generator()
        seed_host = torch.manual_seed
        monkeypatch.setattr(device, "_has_gpu", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_rng_state", self._states.get_state)
        monkeypatch.setattr(torch.cuda, "set_rng_state", self._states.set_state)
        monkeypatch.setattr(
            torch, "manual_seed", lambda seed: (seed_host(seed), self._states.manual_seed(seed))
        )


@pytest.mark.feature("Platforms: streams of random numbers leave the seed of initial weights alone")
def test_on_a_gpu_the_host_keeps_the_seed_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library's own loop starts dense weights from it: equal on all ranks of experts."""
    _OwnGenerator(monkeypatch)
    for ep_rank in (0, 1):
        model_parallel_seed(1234, tp_rank=0, ep_rank=ep_rank)
        assert torch.initial_seed() == 1234
        drawn = torch.rand(2)
        assert torch.equal(drawn, torch.rand(2, generator=torch.Generator().manual_seed(1234)))

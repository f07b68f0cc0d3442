"""What sharding saves: bytes of storages that are alive at once, counted."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

import pretrain_gpt
from megatron.core.config.errors import ConfigError
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.fsdp import FullyShardedDataParallel
from megatron.core.parallel.process_groups_config import create_process_groups, make_grids
from megatron.core.params import param_init
from megatron.core.params.param_info import ParamInfo, info_of, local_part
from megatron.training.initialize import configure, start
from megatron.training.runtime import setup
from megatron.training.runtime.context import RunContext
from tests.distributed.test_fsdp import INSTANCES, SHARD
from tests.support.one_rank_training import ModelConfig
from tests.support.ranks import run_ranks
from tests.support.runs import TINY, train_gpt

META = "--init-model-with-meta-device"
SHARED = f"{INSTANCES} --enable-full-sharding-in-hsdp"
# Of parameters far more than of activations, in layers of which one is little.
MODEL = "--num-layers 6 --hidden-size 64 --seq-length 4 --micro-batch-size 1 --vocab-size 20"


class LiveBytes(TorchDispatchMode):
    """``most``: bytes of all storages made under it, at the moment when that was most."""

    def __init__(self) -> None:
        super().__init__()
        self.storages = WeakIdKeyDictionary()
        self.most = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        tensors = [local_part(t) for t in tree_leaves(result) if isinstance(t, Tensor)]
        held = [t.untyped_storage() for t in tensors if not t.is_meta]
        new = [s for s in held if s not in self.storages and s.nbytes() >= 1024]
        for storage in new:
            self.storages[storage] = None
        if new:
            self.most = max(self.most, sum(storage.nbytes() for storage in list(self.storages)))
        return result


def most_bytes(rank: int, world_size: int, flags: str) -> int:
    """Of a training run on the first rank."""
    flags += f" --train-iters 2 --global-batch-size {world_size}"
    argv = [*TINY, *MODEL.split(), *flags.split()]
    live = LiveBytes()
    watched = live if rank == 0 else contextlib.nullcontext()
    with silence(), mock.patch.object(param_init, "_draw", drawn_in_no_time), watched:
        train_gpt(rank, world_size, argv)
    return live.most


def bytes_before_training(rank: int, world_size: int, flags: str) -> tuple[int, int, int]:
    """Of parameters here, of their optimizer's state, and the most while the model was built."""
    live = LiveBytes()
    with mock.patch.object(param_init, "_draw", drawn_in_no_time):
        context, chunks = build(f"{MODEL} {flags}", live)
    optimizer, _ = setup.build_optimizer(context, chunks)
    states = [state for _, _, named in optimizer.named_state() for state in named.values()]
    params = [p for chunk in chunks for p in chunk.parameters()]
    return sum(local_part(p).nbytes for p in params), sum(s.nbytes for s in states), live.most


Parts = dict[str, tuple[ParamInfo, Tensor]]


def first_weights(rank: int, world_size: int, flags: str) -> Parts:
    """What this rank holds of a model before training."""
    _, (chunk,) = build(flags, contextlib.nullcontext())
    return {info_of(p).name: (info_of(p), local_part(p.detach())) for p in chunk.parameters()}


def build(
    flags: str, watched: contextlib.AbstractContextManager[Any]
) -> tuple[RunContext, list[nn.Module]]:
    """A context of a run, and its model, built while ``watched`` is open."""
    with silence(), mock.patch("sys.argv", ["pretrain_gpt.py", *TINY, *flags.split()]):
        run = start(configure())
        with watched:
            chunks = setup.build_model_chunks(run, pretrain_gpt.model_provider)
    return run, chunks


@contextlib.contextmanager
def silence() -> Iterator[None]:
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield


def drawn_in_no_time(starts: Tensor, width: int, *_: Any) -> Tensor:
    return torch.full((len(starts), width), 0.01)


@pytest.mark.feature("Data parallel: each strategy of --use-megatron-fsdp takes less memory")
def test_memory_falls_from_strategy_to_strategy() -> None:
    ranks = 3
    # Sets of parameters, gradients and two moments, whole or a part of each.  Gloo scatters what it
    # has reduced in a copy; parameters in parts are gathered beside them, all or layer by layer.
    # When a finished collective lets go of its tensors is not ours to say: one set is left open.
    sets = {
        "no_shard": 4.0,
        "optim": 2 + 2 / ranks + 1,
        f"optim_grads {META}": 4 / ranks + 1,
        f"optim_grads_params {META}": 4 / ranks,
    }
    weights = 4 * 6 * 12 * 64**2  # bytes of the matrices in layers
    most = {name: run_ranks(most_bytes, ranks, f"{SHARD} {name}")[0] / weights for name in sets}
    for name, expected in sets.items():
        assert expected <= most[name] < expected + 1, most
    assert sorted(most, key=most.get, reverse=True) == [*sets], most


@pytest.mark.feature("Data parallel: a sharded model is built without memory for the whole")
def test_a_rank_has_memory_for_its_parts_alone() -> None:
    strategy = f"{SHARD} optim_grads_params {META}"
    alone = run_ranks(bytes_before_training, 4, f"{strategy} {INSTANCES}")
    shared = run_ranks(bytes_before_training, 4, f"{strategy} {SHARED}")
    for held, _, most in alone:
        assert held <= most < 1.25 * held
    states = [state for _, state, _ in shared]
    assert sum(states) == sum(state for _, state, _ in alone) / 2
    assert max(states) < 0.55 * alone[0][1]


def test_a_model_built_on_meta_has_the_same_weights() -> None:
    flags = "--use-torch-fsdp2 --bf16 --swiglu"
    usual = run_ranks(first_weights, 2, flags)
    on_meta = run_ranks(first_weights, 2, f"{flags} {META}")
    for expected, found in zip(usual, on_meta, strict=True):
        assert [*found] == [*expected]
        for name, (info, values) in expected.items():
            assert found[name][0] == info
            assert torch.equal(found[name][1], values), name


def wrap_buffers(rank: int, world_size: int) -> None:
    with torch.device("meta"):
        model = nn.BatchNorm1d(4)
    groups = create_process_groups(*make_grids(world_size))
    config = DistributedDataParallelConfig(use_torch_fsdp2=True)
    with pytest.raises(
        ConfigError, match="no record of the initial values of running_mean; create it"
    ):
        FullyShardedDataParallel(ModelConfig(), config, model, pg_collection=groups)


def test_values_that_nothing_describes_are_refused() -> None:
    run_ranks(wrap_buffers, 1)

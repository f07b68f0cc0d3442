"""Muon moves a matrix as one process does, however it is cut; tied embeddings stay tied."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.data_parallel_base import DataParallelBase
from megatron.core.distributed.fsdp import FullyShardedDataParallel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.parallel.process_groups_config import create_process_groups, make_grids
from megatron.core.params.param_info import ParamInfo, info_of, local_part, set_info
from megatron.training.step.train_step import (
    clear_gradients,
    forward_backward,
    reduce_gradients,
)
from tests.distributed.test_planner import _data
from tests.support import tolerances
from tests.support.one_rank_training import ModelConfig
from tests.support.ranks import run_ranks
from tests.support.runs import TINY
from tests.support.training_run import training_run

# Whole shape, the dimension that is cut, and what lies in it.
SHAPES: dict[str, tuple[tuple[int, ...], int | None, dict[str, Any]]] = {
    "qkv": ((48, 16), 0, {"interleaved": (4, 2, 2)}),
    "proj": ((16, 24), 1, {}),
    "fc1": ((80, 16), 0, {"blocks": (1, 1)}),
    "fc2": ((16, 40), 1, {}),
    "norm": ((16,), None, {}),
    "router": ((6, 16), None, {}),
}


def drawn(name: str, step: int) -> Tensor:
    shape, generator = SHAPES[name][0], torch.Generator().manual_seed(97 * step + len(name))
    return torch.randn(shape, generator=generator)


def share(name: str, whole: Tensor, info: ParamInfo) -> Tensor:
    """What a tensor-parallel rank holds."""
    local = torch.empty([n // info.shard_count if d == info.shard_dim else n
                         for d, n in enumerate(whole.shape)])  # fmt: skip
    for offset, view in info.pieces(local):
        view.copy_(whole[tuple(slice(o, o + n) for o, n in zip(offset, view.shape, strict=True))])
    return local


def trained(
    rank: int, world_size: int, tp: int, ddp: dict[str, Any], mode: str
) -> dict[str, list[tuple[tuple[int, ...], Tensor]]]:
    """Boxes of the parameters of this rank after some updates by given gradients."""
    groups = create_process_groups(*make_grids(world_size, tp=tp))
    module = nn.Module()
    for name, (shape, dim, more) in SHAPES.items():
        info = ParamInfo(
            global_shape=shape,
            name=name,
            shard_dim=dim,
            shard_index=groups.tp.rank() if dim is not None else 0,
            shard_count=tp if dim is not None else 1,
            **more,
        )
        param = nn.Parameter(share(name, drawn(name, 0), info))
        set_info(param, info)
        module.register_parameter(name, param)
    infos = {name: info_of(p) for name, p in module.named_parameters()}
    config = DistributedDataParallelConfig(check_for_nan_in_grad=False, **ddp)
    kind = FullyShardedDataParallel if config.use_torch_fsdp2 else DistributedDataParallel
    wrapped: DataParallelBase = kind(ModelConfig(), config, module, pg_collection=groups)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="muon",
            lr=0.02,
            weight_decay=0.1,
            clip_grad=0.0,
            use_distributed_optimizer=config.use_distributed_optimizer,
            muon_tp_mode=mode,
            muon_fp32_matmul_prec="high",
        ),
        [wrapped],
        pg_collection=groups,
    )
    for step in (1, 2, 3):
        wrapped.zero_grad_buffer()
        for name, param in module.named_parameters():
            grad = share(name, drawn(name, step), infos[name])
            if config.use_torch_fsdp2:
                begin = info_of(param).part.start
                local = local_part(param)
                param.grad = type(param.data).from_local(
                    grad.view(-1)[begin : begin + local.numel()].view(local.shape),
                    param.device_mesh, param.placements, shape=param.shape, stride=param.stride(),
                )  # fmt: skip
            elif hasattr(param, "main_grad"):
                param.main_grad.copy_(grad)
            else:
                param.grad = grad
        if not config.use_torch_fsdp2:
            wrapped.finish_grad_sync()
        optimizer.step()
        wrapped.finish_param_sync()
    return {
        name: [(offset, view.clone()) for offset, view in info_of(p).pieces(local_part(p.detach()))]
        for name, p in module.named_parameters()
    }


def whole(ranks: list[dict[str, list[tuple[tuple[int, ...], Tensor]]]]) -> dict[str, Tensor]:
    found = {name: torch.full(shape, torch.nan) for name, (shape, _, _) in SHAPES.items()}
    for rank in ranks:
        for name, boxes in rank.items():
            for offset, view in boxes:
                place = tuple(slice(o, o + n) for o, n in zip(offset, view.shape, strict=True))
                found[name][place] = view
    return found


ZERO = {"use_distributed_optimizer": True}


@pytest.mark.parametrize(
    ("world_size", "tp", "ddp", "mode", "tolerance"),
    [
        (2, 2, {}, "duplicated", tolerances.BITWISE),
        (2, 1, ZERO, "duplicated", tolerances.BITWISE),
        (4, 1, {"bucket_size": 100, "overlap_grad_reduce": True, **ZERO}, "duplicated",
         tolerances.BITWISE),
        (4, 2, ZERO, "duplicated", tolerances.BITWISE),
        (3, 1, {"use_torch_fsdp2": True}, "duplicated", tolerances.of(torch.float32)),
        # The last of four ranks hold no row of a matrix with six: two, two, two, none.
        (4, 1, {"use_torch_fsdp2": True}, "duplicated", tolerances.of(torch.float32)),
        (4, 2, ZERO, "distributed", tolerances.of(torch.float32)),
    ],
)  # fmt: skip
def test_a_matrix_is_moved_whole_however_it_is_cut(
    world_size: int, tp: int, ddp: dict, mode: str, tolerance: dict
):
    expected = whole(run_ranks(trained, 1, 1, {}, "duplicated"))
    assert not any(tensor.isnan().any() for tensor in expected.values())
    found = whole(run_ranks(trained, world_size, tp, ddp, mode))
    torch.testing.assert_close(found, expected, **tolerance)


def test_the_blockwise_mode_takes_each_share_for_a_matrix():
    one = whole(run_ranks(trained, 1, 1, {}, "blockwise"))
    two = whole(run_ranks(trained, 2, 2, {}, "blockwise"))
    assert {name for name in SHAPES if not torch.equal(one[name], two[name])} == {
        "qkv", "proj", "fc1", "fc2"
    }  # fmt: skip


def _embedding(rank: int, world_size: int, words: str) -> Tensor:
    """The copy of this stage after some steps of a real run."""
    with contextlib.redirect_stdout(io.StringIO()):
        run = training_run([*TINY, *words.split()])
    run.data.train = [_data(run.config) for _ in run.model_chunks]
    for _ in range(3):
        clear_gradients(run)
        losses = forward_backward(run, run.data.train, run.batches.num_microbatches(0))
        reduce_gradients(run, losses)
        run.optimizer.step()
    (copy,) = (p for p in run.model_chunks[0].parameters() if info_of(p).is_shared_embedding)
    assert dist.get_world_size() == world_size
    return copy.detach().clone()


@pytest.mark.parametrize("words", ["--optimizer muon", "--optimizer dist_muon --bf16"])
def test_tied_embeddings_stay_tied(words: str):
    copies = run_ranks(_embedding, 2, f"--pipeline-model-parallel-size 2 {words}")
    assert torch.equal(*copies)

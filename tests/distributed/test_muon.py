"""Muon moves a matrix as one process does, however it is cut; tied embeddings stay tied."""

from __future__ import annotations

import contextlib
import io
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.data_parallel_base import DataParallelBase
from megatron.core.distributed.fsdp import FullyShardedDataParallel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
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
    rank: int, world_size: int, tp: int, ddp: dict[str, Any], mode: str, rule: str = "muon"
) -> dict[str, list[tuple[tuple[int, ...], Tensor]]]:
    """Boxes of the parameters of this rank after some updates by given gradients."""
    optimizer, module = updated(world_size, tp, ddp, mode, rule)
    named = [(name, info_of(p), local_part(p.detach())) for name, p in module.named_parameters()]
    for name, info, state in optimizer.named_state():
        named += [(f"{kind} {name}", info, kept) for kind, kept in state.items()]
    return {
        name: [(offset, view.clone()) for offset, view in info.pieces(tensor)]
        for name, info, tensor in named
    }


def updated(
    world_size: int, tp: int, ddp: dict[str, Any], mode: str, rule: str
) -> tuple[MegatronOptimizer, nn.Module]:
    """Return the optimizer and the parameters of this rank after three updates."""
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
            optimizer=rule,
            lr=0.02,
            weight_decay=0.1,
            clip_grad=0.0,
            use_distributed_optimizer=config.use_distributed_optimizer,
            muon_tp_mode=mode,
            muon_fp32_matmul_prec="high",
            soap_precondition_frequency=1,
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
    return optimizer, module


def whole(ranks: list[dict[str, list[tuple[tuple[int, ...], Tensor]]]]) -> dict[str, Tensor]:
    """Return the parameters and the state that the ranks have boxes of."""
    found: dict[str, Tensor] = {}
    for name in {name for rank in ranks for name in rank}:
        boxes = [box for rank in ranks for box in rank.get(name, ())]
        ends = [[o + n for o, n in zip(at, view.shape, strict=True)] for at, view in boxes]
        found[name] = torch.full([max(sizes) for sizes in zip(*ends, strict=True)], torch.nan)
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


@pytest.mark.parametrize(
    ("world_size", "tp", "ddp"),
    [(4, 2, {"bucket_size": 100, **ZERO}), (3, 1, {"use_torch_fsdp2": True})],
)
def test_soap_updates_a_matrix_whole_however_it_is_cut(world_size: int, tp: int, ddp: dict):
    expected = whole(run_ranks(trained, 1, 1, {}, "duplicated", "soap"))
    found = whole(run_ranks(trained, world_size, tp, ddp, "duplicated", "soap"))
    # FSDP adds no padding to a row, but weight decay and update may round in another order.
    is_zero = "use_torch_fsdp2" not in ddp
    tolerance = tolerances.BITWISE if is_zero else tolerances.of(torch.float32)
    torch.testing.assert_close(found, expected, **tolerance)


def _state_bytes(rank: int, world_size: int, rule: str) -> dict[str, int]:
    """Return the bytes of this rank's optimizer state, by its kind."""
    optimizer, _ = updated(world_size, 1, ZERO, "duplicated", rule)
    found: Counter[str] = Counter()
    for kind, tensor in optimizer.tensors_by_kind():
        found[kind.partition(".")[0]] += tensor.nbytes
    return dict(found)


@pytest.mark.parametrize("rule", ["muon", "soap"])
def test_data_parallel_ranks_divide_the_state_of_matrices(rule: str):
    (alone,) = run_ranks(_state_bytes, 1, rule)
    ranks = run_ranks(_state_bytes, 3, rule)
    kinds = alone.keys() - {"main parameters", "exp_avg", "exp_avg_sq", "step"}
    assert kinds == (
        {"momentum_buffer"}
        if rule == "muon"
        else {f"soap_{kind}" for kind in ("mean", "square")}
        | {f"soap_{kind}_{side}" for kind in ("factor", "basis") for side in "lr"}
    )
    for kind in kinds:
        assert sum(rank.get(kind, 0) for rank in ranks) == alone[kind], kind
    largest = max(sum(rank.get(kind, 0) for kind in kinds) for rank in ranks)
    assert largest < 0.75 * sum(alone[kind] for kind in kinds)


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

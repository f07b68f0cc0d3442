"""The distributed optimizer updates what the plain one updates, and keeps a part of it."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core.device import cpu_kernels
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.distributed.param_buffer import ParamGather
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import calc_params_l2_norm
from megatron.core.optimizer.reduced_precision_state import StateStorage
from megatron.core.parallel.process_groups_config import create_process_groups, make_grids
from megatron.core.params.param_info import ParamInfo, info_of, set_info
from tests.support import selection, tolerances
from tests.support.one_rank_training import ModelConfig, TinyModel, mean_loss, token_batch
from tests.support.ranks import run_ranks

STEPS = 3
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
# Buckets of a few parameters; the last one is filled up with padding.
BUCKETS = {"bucket_size": 100, **OVERLAP}
AHEAD = {"overlap_param_gather_with_optimizer_step": True}
SHARDED = {"use_distributed_optimizer": True}
IN_16_BITS = {
    "use_precision_aware_optimizer": True,
    "exp_avg_dtype": "bf16",
    "exp_avg_sq_dtype": "bf16",
}
FP16 = {"initial_loss_scale": 4096.0, "loss_scale_window": 2}


class Model(TinyModel):
    """Tied, uneven, with parameters of other groups: large ones are cut, small ones are not."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(dtype=dtype)
        self.wide = nn.Linear(8, 77).to(dtype)
        self.scale = nn.Parameter(torch.ones((), dtype=dtype))
        self.frozen = nn.Parameter(torch.ones(3, dtype=dtype), requires_grad=False)
        embedding = self.embedding.weight
        set_info(
            embedding,
            ParamInfo(global_shape=(13, 8), shared_over="embd", is_embedding_or_output=True),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.wide(self.embedding(tokens)).float().tanh().mean(-1, keepdim=True)
        return super().forward(tokens) * (1 + hidden.to(self.scale.dtype) * self.scale)


class Run:
    """A model, its wrapper and its optimizer on this rank, with groups of its own making."""

    def __init__(
        self,
        ddp: dict[str, Any],
        optimizer: dict[str, Any],
        dtype: torch.dtype = torch.float32,
        **model: Any,
    ) -> None:
        ddp_config = DistributedDataParallelConfig(
            **{"grad_reduce_in_fp32": True, "check_for_nan_in_grad": False, **ddp}
        )
        is_sharded = ddp_config.use_distributed_optimizer
        instances = ddp_config.num_distributed_optimizer_instances
        groups = create_process_groups(
            *make_grids(dist.get_world_size()), num_distributed_optimizer_instances=instances
        )
        self.model = Model(dtype)
        self.ddp = DistributedDataParallel(
            ModelConfig(deterministic_mode=True, **model),
            ddp_config,
            self.model,
            pg_collection=groups,
        )
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                **{
                    "lr": 0.02,
                    "weight_decay": 0.1,
                    "log_num_zeros_in_grad": True,
                    "use_distributed_optimizer": is_sharded,
                    **optimizer,
                }
            ),
            [self.ddp],
            pg_collection=groups,
            scale_lr_cond=lambda name, _: "second" in name,
            lr_mult=0.5,
        )

    def step(self, seed: int) -> tuple[float | None, int | None]:
        """One update from two micro-batches; the norm and the number of zeros."""
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        rank, size = dist.get_rank(), dist.get_world_size()
        first, last = token_batch(2 * size, seed).chunk(size)[rank].chunk(2)
        for tokens, context in ((first, self.ddp.no_sync()), (last, contextlib.nullcontext())):
            with context:
                self.optimizer.scale_loss(mean_loss(self.ddp, tokens) / 2).backward()
        finalize_model_grads([self.ddp])
        return self.optimizer.step()[1:]

    def weights(self) -> dict[str, Tensor]:
        """Of the whole model, as a checkpoint would read them."""
        return {name: t.clone() for name, t in self.ddp.state_dict().items()}

    def state_bytes(self) -> int:
        """Of everything that the optimizer keeps for single parameters."""
        return sum(
            tensor.nbytes
            for _, _, state in self.optimizer.named_state()
            for kept in state.values()
            for tensor in (kept.tensors if isinstance(kept, StateStorage) else (kept,))
        )


def train(
    rank: int, world_size: int, ddp: dict, optimizer: dict, dtype: torch.dtype
) -> tuple[list[tuple], float, dict[str, Tensor]]:
    """Norms and zero counts, the norm of the parameters, and the weights after some steps."""
    run = Run(ddp, optimizer, dtype)
    counts = [run.step(seed) for seed in range(STEPS)]
    return counts, calc_params_l2_norm([run.ddp], run.ddp.groups), run.weights()


@pytest.mark.feature(
    "Optimizer: the distributed optimizer (ZeRO-1) makes the bits of the plain one"
)
@pytest.mark.parametrize(
    ("world_size", "dtype", "rule", "ddp"),
    selection.first(
        5,
        [
            (4, torch.float32, AHEAD, BUCKETS),
            (4, torch.bfloat16, {"optimizer": "sgd"}, {"bucket_size": 1, **OVERLAP}),
            (2, torch.float16, {**FP16, **AHEAD}, {"ddp_num_buckets": 3, **OVERLAP}),
            (3, torch.float32, {"decoupled_lr": 0.1}, {"average_in_collective": True, **OVERLAP}),
            (4, torch.bfloat16, IN_16_BITS, {"grad_reduce_in_fp32": False, **BUCKETS}),
            (2, torch.float32, {}, {}),
            (8, torch.bfloat16, {}, BUCKETS),
            (2, torch.bfloat16, {}, {"grad_reduce_in_fp32": False, **BUCKETS}),
            (2, torch.float32, {}, {"pad_buckets_for_high_nccl_busbw": True}),
        ],
    ),
)
def test_weights_are_bit_for_bit_those_of_the_plain_optimizer(
    world_size: int, dtype: torch.dtype, rule: dict, ddp: dict
):
    rule = {"clip_grad": 0.0, **rule}
    plain = run_ranks(train, world_size, {**ddp, "overlap_param_gather": False}, rule, dtype)
    sharded = run_ranks(train, world_size, {**ddp, **SHARDED}, rule, dtype)
    start = Model(dtype).state_dict()
    assert not torch.equal(plain[0][2]["wide.weight"], start["wide.weight"])
    for counts, params_norm, weights in sharded:
        torch.testing.assert_close(weights, plain[0][2], **tolerances.BITWISE)
        assert (params_norm, counts) == sharded[0][1::-1]
    close_counts(sharded[0], plain[0])


def close_counts(found: tuple, expected: tuple) -> None:
    assert found[1] == pytest.approx(expected[1], rel=1e-6)
    for (norm, zeros), (right_norm, right_zeros) in zip(found[0], expected[0], strict=True):
        assert norm == pytest.approx(right_norm, rel=1e-6)
        assert zeros == right_zeros


def test_clipping_changes_weights_by_no_more_than_the_norms_rounding():
    rule = {"clip_grad": 0.05}
    plain = run_ranks(train, 4, {}, rule, torch.float32)[0]
    sharded = run_ranks(train, 4, {**BUCKETS, **SHARDED}, rule, torch.float32)[0]
    close_counts(sharded, plain)
    for name, tensor in plain[2].items():
        torch.testing.assert_close(sharded[2][name], tensor, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("instances", selection.only([2], [2, 4]))
def test_several_instances_hold_the_same_and_train_like_one(instances: int, average: bool):
    ddp = {"average_in_collective": average, **BUCKETS, **SHARDED}
    one = run_ranks(train, 4, ddp, {}, torch.float32)[0]
    several = run_ranks(
        train, 4, {"num_distributed_optimizer_instances": instances, **ddp}, {}, torch.float32
    )
    for result in several:
        torch.testing.assert_close(result, several[0], **tolerances.BITWISE)
    close_counts(several[0], one)
    torch.testing.assert_close(several[0][2], one[2], **tolerances.of(torch.float32))


def _one_process(rank: int, world_size: int, batch: int) -> tuple[list[tuple], dict]:
    run = Run({}, {}, torch.float32)
    counts = []
    for seed in range(STEPS):
        run.ddp.zero_grad_buffer()
        run.optimizer.zero_grad()
        mean_loss(run.ddp, token_batch(batch, seed)).backward()
        finalize_model_grads([run.ddp])
        counts.append(run.optimizer.step()[1:])
    return counts, run.weights()


def test_four_sharers_train_like_one_process():
    ((counts, weights),) = run_ranks(_one_process, 1, 8)
    found = run_ranks(train, 4, {**BUCKETS, **SHARDED}, {}, torch.float32)[0]
    for (norm, _), (right_norm, _) in zip(found[0], counts, strict=True):
        assert norm == pytest.approx(right_norm, rel=1e-6)
    torch.testing.assert_close(found[2], weights, **tolerances.GRADIENT)


def _memory(rank: int, world_size: int, dtype: torch.dtype) -> dict[str, int]:
    run = Run({**BUCKETS, **SHARDED}, {}, dtype)
    group = run.ddp.groups.dp_cp
    buffers = [buffer.layout for buffer in run.ddp.grad_buffers.values()]
    assert all(p.data_ptr() for p in run.model.parameters())
    return {
        "state": run.state_bytes(),
        "owned": sum(
            stop - start
            for layout in buffers
            for _, start, stop in layout.owned_parts(group.rank(), group.size())
        ),
        "params": sum(p.numel() for p in run.model.parameters() if p.requires_grad),
    }


@pytest.mark.parametrize(("dtype", "bytes_each"), [(torch.float32, 8), (torch.bfloat16, 12)])
def test_every_byte_of_state_is_on_one_rank(dtype: torch.dtype, bytes_each: int):
    if dtype == torch.bfloat16 and cpu_kernels.compiled() is not None:
        bytes_each -= 2  # the main parameter's upper half is the weight
    ranks = run_ranks(_memory, 4, dtype)
    assert [r["state"] for r in ranks] == [r["owned"] * bytes_each for r in ranks]
    assert sum(r["owned"] for r in ranks) == ranks[0]["params"]
    assert sum(r["owned"] > 0 for r in ranks) > 1


def _overflow_in_one_rank(rank: int, world_size: int) -> list[Any]:
    run = Run(SHARDED, FP16, torch.float16)
    before = run.weights()
    if rank == 1:
        run.model.second.bias.register_hook(lambda grad: grad * float("inf"))
    result = run.step(0)
    same = all(torch.equal(t, before[n]) for n, t in run.weights().items())
    return [result, same]


def test_an_overflow_on_one_rank_skips_the_step_on_all():
    assert run_ranks(_overflow_in_one_rank, 2) == [[(None, None), True]] * 2


def _poisoned(rank: int, world_size: int, optimizer: dict) -> list[bool]:
    """What was not gathered is NaN: whoever reads it too early shows it."""
    begin = ParamGather.begin

    def spoil_and_begin(self: ParamGather) -> None:
        begin(self)
        for bucket in self.buckets:
            shares = bucket.data.view(world_size, -1)
            shares[[r for r in range(world_size) if r != rank]] = float("nan")

    with mock.patch.object(ParamGather, "begin", spoil_and_begin):
        run = Run({**BUCKETS, **SHARDED}, optimizer)
        run.step(0)
        stale = any(p.isnan().any() for p in run.model.parameters())
        finite = [bool(torch.isfinite(mean_loss(run.ddp, token_batch(2))))]
        run.step(1)
        finite.append(bool(torch.isfinite(torch.tensor(run.step(2)[0]))))
        run.step(3)
        finite.append(all(bool(t.isfinite().all()) for t in run.weights().values()))
    return [stale, *finite]


@pytest.mark.parametrize("optimizer", [{}, AHEAD])
def test_parameters_are_read_after_they_have_come_back(optimizer: dict):
    stale, *finite = zip(*run_ranks(_poisoned, 2, optimizer), strict=True)
    assert all(stale) or optimizer  # there the gathers may be over already
    assert all(all(ranks) for ranks in finite)


def _orders(rank: int, world_size: int) -> list[float]:
    """Ranks need their parameters in other orders, and one never needs some."""
    model = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(4))
    groups = create_process_groups(*make_grids(world_size))
    config = DistributedDataParallelConfig(bucket_size=1, **OVERLAP, **SHARDED)
    ddp = DistributedDataParallel(ModelConfig(), config, model, pg_collection=groups)
    options = OptimizerConfig(lr=1.0, optimizer="sgd", use_distributed_optimizer=True, clip_grad=0)
    optimizer = get_megatron_optimizer(options, [ddp], pg_collection=groups)
    for p in model.parameters():
        p.data.zero_()
    for _ in range(3):
        ddp.zero_grad_buffer()
        for layer in list(model)[:3] if rank == 0 else reversed(model):
            layer(torch.ones(1, 16)).sum().backward()
        finalize_model_grads([ddp])
        optimizer.step()
    ddp.finish_param_sync()
    return [float(p.mean()) for p in model.parameters()]


def test_ranks_that_need_parameters_in_other_orders_meet_in_the_same_gathers():
    first, second = run_ranks(_orders, 2)
    assert first == second
    assert first[3] == first[2] / 2 != 0.0


def _partial(rank: int, world_size: int) -> dict[str, Tensor]:
    """Two tensor-parallel ranks by two replicas; the norm's gradient is partial on each."""
    model = nn.ModuleDict({"norm": nn.LayerNorm(300), "linear": nn.Linear(30, 20, bias=False)})
    for name, p in model.named_parameters():
        partial = name.startswith("norm")
        info = ParamInfo(name=name, global_shape=tuple(p.shape), sequence_parallel=partial)
        set_info(p, info)
    groups = create_process_groups(*make_grids(world_size, tp=2))
    config = DistributedDataParallelConfig(use_distributed_optimizer=True)
    ddp = DistributedDataParallel(ModelConfig(), config, model, pg_collection=groups)
    factor = 10 ** groups.tp.rank() * (1 + groups.dp.rank())
    (sum(p.sum() for p in model.parameters()) * factor).backward()
    finalize_model_grads([ddp])
    return {info_of(p).name: grad.clone() for p, grad in ddp.reduced_gradients()}


def test_gradients_that_are_partial_over_the_sequence_are_summed_where_they_are_owned():
    results = run_ranks(_partial, 4)
    for tp in (0, 1):  # the replicas of each hold disjoint parts
        replicas = results[tp::2]
        for name, numel, mean in (
            ("norm.weight", 300, 16.5),
            ("norm.bias", 300, 16.5),
            ("linear.weight", 600, (1.5, 15.0)[tp]),
        ):
            whole = torch.cat([r[name] for r in replicas if name in r])
            assert whole.tolist() == [mean] * numel


def _unwrapped(rank: int, world_size: int) -> str:
    groups = create_process_groups(*make_grids(world_size))
    config = OptimizerConfig(lr=1.0, use_distributed_optimizer=True)
    try:
        get_megatron_optimizer(config, [TinyModel()], pg_collection=groups)
    except ValueError as error:
        return str(error)
    return "no error"


def test_a_model_without_the_wrapper_is_refused():
    (message,) = run_ranks(_unwrapped, 1)
    assert message.startswith("--use-distributed-optimizer needs model chunks wrapped in")

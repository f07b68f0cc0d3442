"""Layers, random streams and helpers as projects call them: in one process, without groups."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megatron.core import tensor_parallel, utils
from megatron.core.params.param_info import info_of
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.pipeline_parallel.utils import is_vp_first_stage, is_vp_last_stage
from megatron.core.tensor_parallel import layers, random
from megatron.core.tensor_parallel.utils import VocabUtility, split_tensor_along_last_dim
from megatron.core.transformer.module import Float16Module
from tests.support import tolerances
from tests.support.one_process import tiny_config


def test_layers_without_groups_are_torchs() -> None:
    config = tiny_config(params_dtype=torch.float64)
    common: Any = {"config": config, "init_method": utils.init_method_normal(0.5)}
    column = layers.ColumnParallelLinear(4, 6, **common, keep_master_weight_for_test=True)
    row = layers.RowParallelLinear(
        6, 4, **common, bias=True, input_is_parallel=True, skip_bias_add=True, stride=1
    )
    table = layers.VocabParallelEmbedding(8, 4, init_method=nn.init.ones_, config=config)
    assert torch.equal(table.weight, torch.ones(8, 4, dtype=torch.float64))
    assert (table.vocab_start_index, table.vocab_end_index) == (0, 8)
    nn.init.normal_(table.weight)
    assert 0.2 < column.weight.std() < 0.9
    assert not torch.equal(column.weight, row.weight.t())
    ids = torch.arange(6).view(2, 3)
    y, bias = row(F.gelu(column(input_=table(ids))[0]))
    assert bias is row.bias
    y.square().sum().backward()
    mine = [p.grad for p in (table.weight, column.weight, column.bias, row.weight)]
    inner = F.linear(F.embedding(ids, table.weight), column.weight, column.bias)
    theirs = F.linear(F.gelu(inner), row.weight)
    torch.testing.assert_close(y, theirs, **tolerances.of(torch.float64))
    parameters = [table.weight, column.weight, column.bias, row.weight]
    expected = torch.autograd.grad(theirs.square().sum(), parameters)
    for got, wanted in zip(mine, expected, strict=True):
        torch.testing.assert_close(got, wanted, **tolerances.of(torch.float64))
    for layer, dim in ((column, 0), (row, 1)):
        assert layer.weight.tensor_model_parallel
        assert (layer.weight.partition_dim, layer.weight.partition_stride) == (dim, 1)
    assert column.output_size_per_partition == row.input_size_per_partition == 6
    assert column.config is config


def test_linear_functions_have_torchs_gradients() -> None:
    x = torch.randn(3, 2, 4, requires_grad=True)
    weight, bias = torch.randn(5, 4, requires_grad=True), torch.randn(5, requires_grad=True)
    wanted = torch.autograd.grad(F.linear(x, weight, bias).square().sum(), (x, weight, bias))
    y = layers.linear_with_grad_accumulation_and_async_allreduce(
        x, weight, bias, False, True, False
    )
    grads = torch.autograd.grad(y.square().sum(), (x, weight, bias))
    for got, want in zip(grads, wanted, strict=True):
        torch.testing.assert_close(got, want)
    y = layers.linear_with_frozen_weight(x, weight, bias, False, True, False, None)
    y.square().sum().backward()
    torch.testing.assert_close(x.grad, wanted[0])
    assert weight.grad is bias.grad is None


def test_a_weight_is_the_shard_of_a_master_weight() -> None:
    parts = []
    for rank in range(2):
        weight = torch.empty(4, 3)
        torch.manual_seed(3)
        master = layers._initialize_affine_weight_cpu(
            weight, 8, 3, 4, 0, nn.init.normal_, 2, True, rank=rank, world_size=2
        )
        parts.append(weight)
    blocks = [parts[0][:2], parts[1][:2], parts[0][2:], parts[1][2:]]
    assert torch.equal(torch.cat(blocks), master)
    assert (weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride) == (
        True, 0, 2,
    )  # fmt: skip
    with pytest.raises(AssertionError):
        layers.set_tensor_model_parallel_attributes(weight, True, 0, 1)
    copy = torch.empty(4, 3)
    layers.copy_tensor_model_parallel_attributes(copy, weight)
    assert copy.partition_stride == 2


def test_attributes_that_a_project_sets_are_in_the_record() -> None:
    param = nn.Parameter(torch.zeros(3))
    assert not info_of(param).sequence_parallel
    param.sequence_parallel = True
    param.allreduce = False
    assert info_of(param).sequence_parallel
    assert info_of(param).is_expert


def test_random_streams_have_names_and_seeds() -> None:
    seed = tensor_parallel.model_parallel_cuda_manual_seed
    seed(1, tp_rank=1, ep_rank=0, etp_rank=0, force_reset_rng=True)
    tracker = tensor_parallel.get_cuda_rng_tracker(use_te_rng_tracker=False)
    with tracker.fork():
        second = torch.rand(2)
    with tracker.fork(tensor_parallel.get_data_parallel_rng_tracker_name()):
        shared = torch.rand(2)
    seed(1)  # the ranks of parallel_state: 0 in one process
    with tracker.fork():
        assert not torch.equal(torch.rand(2), second)
    with tracker.fork("data-parallel-rng"):
        assert torch.equal(torch.rand(2), shared)
    x = torch.randn(4, 4, requires_grad=True)
    block = tensor_parallel.CheckpointWithoutOutput(fp8=False)
    y = block.checkpoint(torch.sigmoid, x)
    z = y * 2
    block.discard_output_and_register_recompute(z)
    z.sum().backward()
    torch.testing.assert_close(x.grad, 2 * torch.sigmoid(x) * (1 - torch.sigmoid(x)))


def test_a_project_may_replace_the_backward_of_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    """verl does so, with the helpers of the module; ours frees its tensors by itself."""
    monkeypatch.setattr(random.CheckpointFunction, "backward", None, raising=False)
    x, other = torch.ones(3, requires_grad=True), torch.ones(3)
    with random._fork_rng():
        before = torch.rand(1)
        random._set_all_rng_states(*random._get_all_rng_states())
    assert torch.equal(torch.rand(1), before)
    detached, kept, number = random.detach_variable((x, other, 3))
    assert (detached.requires_grad, kept.requires_grad, number) == (True, False, 3)
    random.safely_set_viewless_tensor_data(other, torch.zeros(2))
    assert other.shape == (2,)
    random.CheckpointFunction.apply(torch.exp, False, x).sum().backward()
    torch.testing.assert_close(x.grad, x.exp())


def test_tensors_without_a_base() -> None:
    x = torch.randn(4, 2, requires_grad=True)
    view = (x * 1)[1:]
    out = utils.make_viewless_tensor(inp=view, requires_grad=True, keep_graph=True)
    assert view._base is not None
    assert out._base is None
    out.sum().backward()
    assert x.grad.sum() == 6
    assert utils.make_viewless_tensor(x, True, True) is x
    wrapped = utils.WrappedTensor(x)
    assert wrapped.unwrap() is x
    with pytest.raises(RuntimeError, match="already been unwrapped"):
        wrapped.unwrap()


def test_helpers_of_models_and_versions() -> None:
    inner = nn.Linear(2, 2)
    wrapped = Float16Module(tiny_config(bf16=True), inner)
    assert utils.unwrap_model([wrapped, inner]) == [inner, inner]
    assert utils.unwrap_model(wrapped) is inner
    with pytest.raises(RuntimeError):
        utils.get_attr_wrapped_model([inner], "weight")
    assert utils.is_torch_min_version("2.1.0")
    assert not utils.is_torch_min_version(str(utils.get_torch_version()), check_equality=False)
    assert not utils.is_te_min_version("99.0")
    assert (utils.get_pg_size(), utils.get_pg_rank()) == (1, 0)
    assert utils.scaled_init_method_normal(0.2, 8).std == pytest.approx(0.05)
    norm = partial(utils.local_multi_tensor_applier, utils.local_multi_tensor_l2_norm, None)
    assert norm([[torch.full((2, 2), 3.0), torch.full((4,), 4.0)]], False)[0].item() == 10
    weight = nn.Parameter(torch.zeros(3, 2))
    weight.main_grad = torch.zeros(3, 2)
    x, grad = torch.randn(4, 1, 2), torch.randn(4, 1, 3)
    utils.drain_embedding_wgrad_compute(tiny_config(), [x, x], [grad, grad], weight, None)
    torch.testing.assert_close(weight.main_grad, 2 * torch.einsum("sbo,sbi->oi", grad, x))


def test_vocabulary_ranges_and_schedule_tables() -> None:
    assert VocabUtility.vocab_range_from_global_vocab_size(12, 1, 3) == (4, 8)
    assert VocabUtility.vocab_range_from_per_partition_vocab_size(4, 2, 3) == (8, 12)
    parts = split_tensor_along_last_dim(torch.arange(6).view(2, 3, 1).expand(2, 3, 4), 2)
    assert [part.shape for part in parts] == [(2, 3, 2)] * 2
    # Groups of three micro-batches, the last of which has two.
    assert get_schedule_table(5, 2, 3) == [
        *((i, 0) for i in range(3)), *((i, 1) for i in range(3)),
        (3, 0), (4, 0), (3, 1), (4, 1),
    ]  # fmt: skip
    assert is_vp_first_stage(None, None)
    assert is_vp_last_stage(1, 2)
    assert not is_vp_last_stage(0, 2)
    with pytest.raises(AssertionError):
        is_vp_first_stage(1, 1)


def test_a_straggler_detector_measures_between_its_calls() -> None:
    detector = utils.StragglerDetector()
    assert not detector.report()
    detector.configure(world=1, rank=0, mmcnt=2, enabled=True)
    try:
        with detector, utils.StragglerDetector()(bdata=True):
            pass
        assert (detector.configured, detector.my_rank, detector.world_size) == (True, 0, 1)
        model_ms, data_ms, *others = detector.elapsed()
        assert model_ms >= data_ms >= 0
        assert others == [0, 0, 0, 0]
        detector.start_method()
        detector.stop_method()
        assert detector.report(total_flops=1e9, log_interval=1)
    finally:
        detector.configure(0, 0)
        detector.reset()

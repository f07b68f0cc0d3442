"""All experts in one product against a loop: values, gradients, and the kernel's limits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core import device
from megatron.core.device.async_host_copy import AsyncHostCopy
from megatron.core.distributed.buffer_plan import plan_buffer
from megatron.core.distributed.param_buffer import make_param_buckets
from megatron.core.fusions import kernels
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.params.param_info import name_parameters
from megatron.core.params.param_init import initialize_parameters
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.weight_gradient import WeightGradQueue
from megatron.core.transformer.low_precision import quantize_layer
from megatron.core.transformer.moe import experts, token_dispatcher
from megatron.core.transformer.moe import grouped_linear as kernel_limits
from megatron.core.transformer.moe.grouped_linear import (
    RowGroups,
    stacked,
    unsupported_reason,
)
from megatron.core.transformer.moe.grouped_linear import grouped_linear as by_groups
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import build_module
from megatron.training.startup_log import print_expert_waits
from tests.support import tolerances
from tests.support.one_process import one_process_groups, one_rank, tiny_config

OUT, IN = 24, 16
COUNTS = {"uneven": (3, 0, 7, 2), "first empty": (0, 5, 1, 1), "no rows": (0, 0, 0, 0)}


def assert_equal(have: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(have, want, **tolerances.of(torch.float32))


def make(counts: tuple[int, ...], in_one_storage: bool) -> tuple[Tensor, list[Tensor]]:
    """Rows, and weights with other values between them in memory."""
    torch.manual_seed(0)
    memory = torch.randn(len(counts), 2, OUT, IN)
    weights = [part[0] if in_one_storage else part[0].clone() for part in memory]
    return torch.randn(sum(counts), IN), [w.detach().requires_grad_() for w in weights]


def grouped_linear(rows: Tensor, counts: tuple[int, ...], weights: list[Tensor]) -> Tensor:
    return by_groups(rows, RowGroups.on(rows.device, counts), weights)


def loop(rows: Tensor, counts: tuple[int, ...], weights: list[Tensor]) -> Tensor:
    parts = zip(rows.split(counts), weights, strict=True)
    return torch.cat([F.linear(mine, weight) for mine, weight in parts])


def gradients(call: Any, counts: Any, in_one_storage: bool, *, by: str) -> list[Tensor]:
    rows, weights = make(counts, in_one_storage)
    rows.requires_grad_()
    y = call(rows, counts, weights)
    # A sum hands back a gradient without strides, which the kernel does not take as it is.
    (y.sum() if by == "sum" else (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum()).backward()
    return [y.detach(), rows.grad, *(weight.grad for weight in weights)]


@pytest.mark.feature("Experts: all of a rank in one grouped matrix product (GPU)")
@pytest.mark.parametrize("by", ["sum", "weights"])
@pytest.mark.parametrize("in_one_storage", [True, False])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_one_product_is_the_loop_in_values_and_gradients(counts, in_one_storage, by):
    found = gradients(grouped_linear, counts, in_one_storage, by=by)
    expected = gradients(loop, counts, in_one_storage, by=by)
    for have, want in zip(found, expected, strict=True):
        assert_equal(have, want)


def test_a_gpu_is_not_asked_how_many_rows_its_experts_have(monkeypatch):
    """Where no token leaves it or is dropped, and no loop adds weight gradients."""
    expected, _ = layer_gradients(monkeypatch, is_on_gpu=True)
    reads: list[AsyncHostCopy] = []
    read = AsyncHostCopy.get_list
    monkeypatch.setattr(token_dispatcher, "is_in_a_gpu", lambda _: True)
    monkeypatch.setattr(AsyncHostCopy, "get_list", lambda late: (reads.append(late), read(late))[1])
    found, two = layer_gradients(monkeypatch, is_on_gpu=True)
    assert two == 2
    assert not reads
    for have, want in zip(found, expected, strict=True):
        assert_equal(have, want)


def test_weights_at_equal_distances_are_not_copied():
    _, weights = make((1, 1, 1), in_one_storage=True)
    view = stacked(weights)
    assert view.data_ptr() == weights[0].data_ptr()
    for mine, weight in zip(view, weights, strict=True):
        assert torch.equal(mine, weight)
    uneven = [weights[0], weights[2], weights[1]]
    assert torch.equal(stacked(uneven)[1], weights[2])
    assert stacked(uneven).data_ptr() != weights[0].data_ptr()


@pytest.mark.parametrize(
    ("weights", "can"),
    [
        ([torch.empty(8, 16)] * 2, False),
        ([torch.empty(8, 16, dtype=torch.bfloat16)] * 2, True),
        ([torch.empty(8, 16, dtype=torch.float64)] * 2, False),
        ([torch.empty(6, 16)] * 2, False),
        ([torch.empty(8, 4, dtype=torch.bfloat16)] * 2, False),
        ([torch.empty(8, 16, dtype=torch.bfloat16)], False),
    ],
)
def test_what_the_kernel_does_not_take_is_left_to_the_loop(weights, can):
    assert (unsupported_reason(weights) is None) is can


def test_weight_gradients_may_be_left_in_a_queue():
    counts = COUNTS["uneven"]
    expected = gradients(loop, counts, True, by="weights")
    rows, weights = make(counts, True)
    queue = WeightGradQueue()
    y = grouped_linear(rows, counts, weights)
    with queue.collecting():
        (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
    assert [weight.grad for weight in weights] == [None] * 4
    queue.run()
    for weight, want in zip(weights, expected[2:], strict=True):
        assert_equal(weight.grad, want)


def layer_of_experts(**changes: Any) -> MoELayer:
    config = tiny_config(
        num_moe_experts=4,
        gated_linear_unit=True,
        activation_func=F.silu,
        **{"add_bias_linear": False, **changes},
    )
    spec = get_gpt_layer_local_spec(4, config=config).submodules.mlp
    offered = {"pg_collection": one_process_groups(), "layer_number": 1}
    layer: MoELayer = build_module(spec, config=config, offered=offered)
    name_parameters(layer)
    initialize_parameters(layer, 1234)
    return layer


def test_experts_of_a_gpu_are_in_one_storage_under_their_own_names(monkeypatch):
    monkeypatch.setattr(device, "is_cuda", lambda *_: True)
    changes = {"params_dtype": torch.bfloat16}
    layer = layer_of_experts(**changes)
    for name in ("linear_fc1", "linear_fc2"):
        weights = [getattr(e, name).weight for e in layer.experts._in_order]
        assert stacked(weights).data_ptr() == weights[0].data_ptr()
    monkeypatch.undo()
    plain = layer_of_experts(**changes).state_dict()
    torch.testing.assert_close(layer.state_dict(), plain, **tolerances.BITWISE)


def test_experts_in_a_buffer_of_parameters_are_not_copied():
    """As the distributed optimizer lays them out, in several buckets or one."""
    layer = layer_of_experts()
    params = [p for name, p in layer.named_parameters() if ".local_experts." in name]
    layout = plan_buffer([p.numel() for p in params], None)
    whole = layout.numel * params[0].element_size()
    make_param_buckets(params, layout, one_rank(), one_rank())
    assert params[0].untyped_storage().nbytes() == whole
    for name in ("linear_fc1", "linear_fc2"):
        weights = [getattr(e, name).weight for e in layer.experts._in_order]
        view = stacked(weights)
        assert view.untyped_storage().data_ptr() == params[0].untyped_storage().data_ptr()
        for mine, weight in zip(view, weights, strict=True):
            assert torch.equal(mine, weight)


@pytest.mark.parametrize(("width", "can"), [(12, False), (16, True)])
def test_both_matrices_have_to_suit_the_kernel(width, can):
    """A gated first matrix is twice as wide as the second."""
    layer = layer_of_experts(moe_ffn_hidden_size=width, params_dtype=torch.bfloat16)
    assert (layer.experts._unsupported is None) is can


class _OtherLinear(ColumnParallelLinear):
    """A layer that would compute its GEMM itself."""


def test_layers_of_other_classes_compute_their_gemms_themselves():
    config = tiny_config(num_moe_experts=4, params_dtype=torch.bfloat16)
    spec = get_gpt_layer_local_spec(4, config=config).submodules.mlp
    matrices = spec.submodules.experts
    assert matrices.linear_fc1 is ColumnParallelLinear
    matrices.linear_fc1 = _OtherLinear
    offered = {"pg_collection": one_process_groups(), "layer_number": 1}
    layer = build_module(spec, config=config, offered=offered)
    assert layer.experts._unsupported == "a _OtherLinear computes its own GEMM"


@pytest.mark.feature("Experts: bf16 layers beside fp8 layers are grouped too (GPU)")
def test_experts_are_grouped_unless_their_layer_is_quantized(monkeypatch):
    gpu = torch.device("cuda")
    monkeypatch.setattr(
        device, "multiplies_fp8", lambda where: False
    )  # nor are fp8 experts grouped
    for first, last in ((1, 0), (0, 0)):
        config = tiny_config(
            num_moe_experts=4,
            params_dtype=torch.bfloat16,
            fp8="hybrid",
            fp8_recipe="tensorwise",
            first_last_layers_bf16=True,
            num_layers_at_start_in_bf16=first,
            num_layers_at_end_in_bf16=last,
        )
        spec = get_gpt_layer_local_spec(4, config=config)
        groups = one_process_groups()
        layer = build_module(
            spec, config=config, offered={"pg_collection": groups, "layer_number": 1}
        )
        quantize_layer(layer, config, 0, pg_collection=groups)
        assert layer.mlp.experts.takes_tail(gpu) is (first == 1)


FP8 = {"fp8": "e4m3", "params_dtype": torch.bfloat16}


@pytest.mark.feature("Experts: one warning at start says why the host waits for row counts (GPU)")
@pytest.mark.parametrize(
    ("changes", "has_kernels", "reason"),
    [
        ({"params_dtype": torch.bfloat16}, False, None),
        ({}, True, "a loop computes them (weights are torch.float32, not torch.bfloat16)"),
        *(
            ({**FP8, "fp8_recipe": recipe}, True, None)
            for recipe in ("delayed", "tensorwise", "blockwise", "mxfp8")
        ),
        (
            {**FP8, "fp8_recipe": "blockwise"},
            False,
            "a loop computes them (fp8 experts need Triton)",
        ),
        (
            {"fp4": "e2m1", "params_dtype": torch.bfloat16},
            True,
            "a loop computes them (their values are fp4)",
        ),
    ],
)
def test_the_reason_for_waits_is_reported(monkeypatch, capsys, changes, has_kernels, reason):
    config = tiny_config(num_moe_experts=4, **changes)
    spec = get_gpt_layer_local_spec(4, config=config)
    groups = one_process_groups()
    offered = {"pg_collection": groups, "layer_number": 1}
    layer = build_module(spec, config=config, offered=offered)
    quantize_layer(layer, config, 0, pg_collection=groups)
    gpu = torch.device("cuda")
    monkeypatch.setattr(device, "current", lambda: gpu)
    monkeypatch.setattr(device, "multiplies_fp8", lambda where: True)
    found = object() if has_kernels else None
    monkeypatch.setattr(kernels, "find", lambda name, *tensors: found)
    print_expert_waits([layer])
    said = capsys.readouterr().out
    start = "WARNING: the host waits in each MoE layer for the number of tokens of each expert: "
    assert said == ("" if reason is None else f"{start}{reason}\n")
    assert layer.mlp.experts.takes_tail(gpu) is (reason is None)
    layer.mlp.experts._in_order[0].linear_fc2.lora = torch.nn.Identity()
    assert not layer.mlp.experts.takes_tail(gpu)
    expected = reason or "a loop computes their adapters"
    assert layer.mlp.experts.wait_reason(gpu) == expected


def layer_gradients(monkeypatch, *, is_on_gpu: bool, **changes: Any) -> tuple[list[Tensor], int]:
    """Of a layer of experts as a GPU would compute it, and how many grouped products it took."""
    calls = []

    def counted(*args: Any) -> Tensor:
        calls.append(args)
        return by_groups(*args)

    with monkeypatch.context() as patch:
        patch.setattr(kernel_limits, "_DTYPES", (torch.float32,))  # the CPU's kernel takes any
        layer = layer_of_experts(**changes)
    x = torch.randn(6, 2, layer.config.hidden_size, generator=torch.Generator().manual_seed(1))
    x.requires_grad_()
    with monkeypatch.context() as patch:
        patch.setattr(device, "is_cuda", lambda *_: is_on_gpu)
        patch.setattr(experts, "grouped_linear", counted)
        y, _ = layer(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters())], len(calls)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"recompute_granularity": "selective", "recompute_modules": ("moe_act",)},
        {"add_bias_linear": True},
    ],
)
def test_a_layer_whose_experts_are_grouped_is_the_same(monkeypatch, changes):
    expected, none = layer_gradients(monkeypatch, is_on_gpu=False, **changes)
    found, two = layer_gradients(monkeypatch, is_on_gpu=True, **changes)
    assert (none, two) == (0, 2)
    for have, want in zip(found, expected, strict=True):
        assert_equal(have, want)

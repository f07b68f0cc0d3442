"""Norms, MLP, specs and layouts: each against its closed form."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.activations import openai_gelu, quick_gelu, squared_relu
from megatron.core.config.errors import ConfigError
from megatron.core.enums import AttnMaskType
from megatron.core.fusions.bias_glu import glu, glu_reference
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.fusions.fused_layer_norm import FusedLayerNorm
from megatron.core.params.param_info import info_of, name_parameters
from megatron.core.params.param_init import initialize_parameters
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.norms import HeadsWideRMSNorm, Norm, l2_norm
from megatron.core.transformer.spec_utils import (
    ModuleSpec,
    build_module,
    get_module,
    import_module,
)
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from tests.support import tolerances
from tests.support.one_process import one_rank, tiny_config


def filled(module: nn.Module) -> nn.Module:
    name_parameters(module)
    initialize_parameters(module, 1)
    return module


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, **tolerances.of(found.dtype))


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("zero_centered", [False, True])
def test_norms_have_unit_scale_at_the_start(kind: str, zero_centered: bool) -> None:
    config = tiny_config(normalization=kind, layernorm_zero_centered_gamma=zero_centered)
    norm = filled(Norm(config, 8, eps=1e-5))
    assert (norm.weight == (0 if zero_centered else 1)).all()
    x = torch.randn(3, 8)
    expected = x - x.mean(-1, keepdim=True) if kind == "LayerNorm" else x
    expected = expected / (expected.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    close(norm(x), expected)
    with torch.no_grad():
        norm.weight.add_(1)
    close(norm(x), 2 * expected)
    assert Norm is WrappedTorchNorm is FusedLayerNorm


def test_a_norm_of_a_float32_stream_gives_the_parameters_dtype() -> None:
    norm = filled(Norm(tiny_config(params_dtype=torch.bfloat16), 8))
    assert norm(torch.randn(3, 8)).dtype == torch.bfloat16


def test_norms_under_sequence_parallelism_say_that_their_gradient_is_partial() -> None:
    for cut in (False, True):
        norm = Norm(tiny_config(sequence_parallel=cut), 8)
        assert all(info_of(p).sequence_parallel is cut for p in norm.parameters())


def test_a_norm_over_all_heads_and_one_without_parameters() -> None:
    x = torch.randn(5, 2, 3, 4)
    wide = filled(HeadsWideRMSNorm(tiny_config(), 12, 1e-6, tp_group=one_rank()))
    flat = x.flatten(-2)
    close(wide(x).flatten(-2), flat / (flat.square().mean(-1, keepdim=True) + 1e-6).sqrt())
    close(l2_norm(x), x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt())


ACTIVATIONS: dict[str, tuple[dict[str, Any], Any]] = {
    "gelu": ({}, lambda x: 0.5 * x * (1 + torch.erf(x / 2**0.5))),
    "fused gelu": (
        {"bias_activation_fusion": True},
        lambda x: 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))),
    ),
    "openai gelu": ({"activation_func": openai_gelu}, lambda x: F.gelu(x, approximate="tanh")),
    "squared relu": ({"activation_func": squared_relu}, lambda x: x.clamp_min(0) ** 2),
    "quick gelu": ({"activation_func": quick_gelu}, lambda x: x / (1 + torch.exp(-1.702 * x))),
    "swiglu": (
        {"activation_func": F.silu, "gated_linear_unit": True},
        lambda x: x[..., :6] / (1 + torch.exp(-x[..., :6])) * x[..., 6:],
    ),
    "geglu": ({"gated_linear_unit": True}, lambda x: F.gelu(x[..., :6]) * x[..., 6:]),
    "fused geglu": (
        {"gated_linear_unit": True, "bias_activation_fusion": True},
        lambda x: F.gelu(x[..., :6], approximate="tanh") * x[..., 6:],
    ),
    "clamped quick geglu": (
        {
            "activation_func": quick_gelu,
            "gated_linear_unit": True,
            "activation_func_clamp_value": 0.7,
            "glu_linear_offset": 1.0,
        },
        lambda x: quick_gelu(x[..., :6].clamp(max=0.7)) * (x[..., 6:].clamp(-0.7, 0.7) + 1),
    ),
    "clamped swiglu": (
        {"activation_func": F.silu, "gated_linear_unit": True, "activation_func_clamp_value": 0.7},
        lambda x: F.silu(x[..., :6].clamp(max=0.7)) * x[..., 6:].clamp(-0.7, 0.7),
    ),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("bias", [True, False])
def test_the_mlp_is_two_matrices_around_its_activation(name: str, bias: bool) -> None:
    changes, act = ACTIVATIONS[name]
    config = tiny_config(ffn_hidden_size=6, add_bias_linear=bias, **changes)
    slots = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    mlp = filled(MLP(config, slots, tp_group=one_rank()))
    for p in mlp.parameters():
        torch.nn.init.normal_(p, std=0.2)  # sums cancel: larger terms round more than is allowed
    x = torch.randn(3, 2, 32)
    first, second = mlp.linear_fc1, mlp.linear_fc2
    inner = F.linear(x, first.weight, first.bias)
    out, rest = mlp(x)
    assert rest is None
    assert (first.bias is not None) is bias
    close(out, F.linear(act(inner), second.weight, second.bias))


def test_gated_activations_have_the_gradient_of_their_reference() -> None:
    x = torch.randn(5, 12, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: glu(x, F.silu), (x,))
    close(glu(x, F.silu), glu_reference(x, F.silu))
    assert torch.autograd.gradcheck(lambda x: glu(x, quick_gelu, 0.7, 1.0), (x,))


def test_the_seam_adds_bias_and_residual_and_drops_only_in_training() -> None:
    x, bias, residual = torch.randn(64, 8), torch.randn(8), torch.randn(64, 8)
    close(get_bias_dropout_add(False, True)((x, bias), residual, 0.5), x + bias + residual)
    close(get_bias_dropout_add(True, False)((x, None), residual, 0.0), x + residual)
    dropped = get_bias_dropout_add(True, False)((x, bias), residual, 0.5) - residual
    is_zero = dropped.abs() < 1e-6
    assert 0.3 < is_zero.float().mean() < 0.7
    close(dropped[~is_zero], (2 * (x + bias))[~is_zero])
    wide = get_bias_dropout_add(False, False)((x.bfloat16(), None), residual, 0.0)
    assert wide.dtype == torch.float32


class Slot(nn.Module):
    def __init__(self, size: int, *, tp_group: object = None, submodules: object = None) -> None:
        super().__init__()
        self.size, self.tp_group, self.submodules = size, tp_group, submodules


def test_a_slot_gets_what_it_asks_for_of_what_is_offered() -> None:
    built = build_module(Slot, 3, offered={"tp_group": "g", "pg_collection": "c"})
    assert (built.size, built.tp_group) == (3, "g")
    spec = ModuleSpec(Slot, params={"tp_group": "fixed"}, submodules="inner")
    built = build_module(spec, 4, offered={"tp_group": "g"})
    assert (built.size, built.tp_group, built.submodules) == (4, "fixed", "inner")
    assert build_module(ModuleSpec(get_bias_dropout_add)) is get_bias_dropout_add
    assert get_module(ModuleSpec((__name__, "Slot"))).__name__ == "Slot"
    with pytest.raises(TypeError, match="while building Slot"):
        build_module(Slot, 3, color="red")


def test_a_spec_that_cannot_be_imported_is_named() -> None:
    assert import_module(("torch.nn", "Linear")) is nn.Linear
    for path in (("torch.nn", "Liner"), ("torch.knn", "Linear"), ("..x", "y"), ("", "y")):
        with pytest.raises(ConfigError, match=f"--spec {path[0]} {path[1]} cannot be imported"):
            import_module(path)
    with pytest.raises(ConfigError, match="takes a module and a name"):
        import_module(["torch.nn"])


def test_an_identity_returns_what_it_gets() -> None:
    assert IdentityOp("any", thing=1)(5, 6) == 5
    assert IdentityFuncOp()(True, False)(7, 8) == 7


class Echo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.inputs = nn.Parameter(torch.ones(2)), None
        self.pre_process = self.post_process = True

    def forward(self, *inputs: Any, mask: Any = None) -> Any:
        self.inputs = inputs
        return {"out": inputs[0] * self.weight, "ids": inputs[1]}


def test_the_half_precision_wrapper_converts_at_both_ends() -> None:
    ids, x = torch.arange(2), torch.ones(2)
    module = Echo()
    wrapped = Float16Module(tiny_config(bf16=True), module)
    out = wrapped(x, ids)
    assert module.weight.dtype == module.inputs[0].dtype == torch.bfloat16
    assert (out["out"].dtype, out["ids"].dtype) == (torch.float32, torch.int64)
    assert list(wrapped.state_dict()) == ["weight"]
    wrapped.load_state_dict({"weight": torch.zeros(2)})
    assert (module.weight == 0).all()
    module = Echo()
    module.pre_process = module.post_process = False
    assert Float16Module(tiny_config(fp16=True), module)(x, ids)["out"].dtype == torch.float32
    assert module.inputs[0].dtype == torch.float32
    with pytest.raises(AssertionError, match="exactly one"):
        Float16Module(tiny_config(), Echo())


class Pair(NamedTuple):
    one: Tensor
    other: int


@pytest.mark.parametrize("base", [dict, list, tuple])
def test_the_half_precision_wrapper_converts_classes_made_of_dicts_and_lists(base: type) -> None:
    x, module = torch.ones(2), Echo()
    own: Any = type("Own", (base,), {})({"x": x} if base is dict else [x])
    out = Float16Module(tiny_config(bf16=True), module)(x, own, OrderedDict(x=[x]), Pair(x, 3))
    _, given, ordered, pair = module.inputs
    key: Any = "x" if base is dict else 0
    assert {t.dtype for t in (given[key], ordered["x"][0], pair.one)} == {torch.bfloat16}
    assert (out["ids"][key].dtype, pair.other) == (torch.float32, 3)


def test_mask_types_have_their_reference_values() -> None:
    assert [m.value for m in AttnMaskType] == [1, 2, 3, 4, 5]

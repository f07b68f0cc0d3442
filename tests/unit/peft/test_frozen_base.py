"""A frozen base in few bits: values, gradients and memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from megatron.core.config.errors import ConfigError
from megatron.core.params.param_init import Init, initialize_parameters
from megatron.core.peft import lora
from megatron.core.peft.lora import LoraConfig, attach_adapters, begin_magnitudes, store_base
from megatron.core.tensor_parallel.frozen_weight import (
    FORMATS,
    FrozenWeight,
    StoredFormat,
    stored,
)
from megatron.core.tensor_parallel.layers import Linear
from tests.support import tolerances
from tests.unit.models.test_gpt_model import build, tokens

# Largest relative rounding error, and bytes of a value, scales included.
PRECISION = {"fp8": (2**-4, 1.04), "int8": (2**-7, 1.04), "nvfp4": (0.26, 0.57)}


@pytest.mark.parametrize("format", FORMATS)
def test_a_stored_weight_is_near_the_weight(format: StoredFormat) -> None:
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(3))
    weight[5] = 0
    found = stored(weight, format, None)
    error = (found.values(torch.float32) - weight).abs()
    assert (error.amax(1) <= PRECISION[format][0] * weight.abs().amax(1)).all()
    assert not found.values(torch.float32)[5].any()
    again = stored(found.values(torch.float32), format, None)
    assert torch.equal(again.values(torch.float32), found.values(torch.float32))
    num_bytes = sum(t.nbytes for t in vars(found).values() if isinstance(t, Tensor))
    assert num_bytes <= PRECISION[format][1] * weight.numel() + 4


def adapted(format: StoredFormat | None, *, use_dora: bool = False) -> nn.Module:
    model = build(model={"share_embeddings_and_output_weights": False})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lora, "START", Init("normal", 0.05))
        config = LoraConfig(rank=4, alpha=8.0, targets=("all-linear",), use_dora=use_dora)
        attach_adapters(model, config)
        initialize_parameters(model, 7)
    if format is not None:
        store_base([model], format)
    return model


def gradients(model: nn.Module) -> dict[str, Tensor]:
    ids, positions = tokens()
    model(ids, positions, None).square().mean().backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.feature("LoRA: the frozen model is stored in fp8, int8 or nvfp4")
@pytest.mark.parametrize("format", FORMATS)
def test_gradients_are_those_of_the_rounded_base(format: StoredFormat) -> None:
    use_dora = format == "int8"
    model = adapted(format, use_dora=use_dora)
    plain = adapted(None, use_dora=use_dora)
    with torch.no_grad():
        for one, other in zip(model.modules(), plain.modules(), strict=True):
            if isinstance(one, Linear) and isinstance(one.quantizer, FrozenWeight):
                assert isinstance(other, Linear)
                assert other.weight is not None
                other.weight.copy_(one.quantizer.weight.values(torch.float32))
                torch.testing.assert_close(one.effective_weight(), other.effective_weight())
    assert begin_magnitudes([model]) == begin_magnitudes([plain]) == use_dora
    found = gradients(model)
    expected = gradients(plain)
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, **tolerances.GRADIENT)


def test_memory_is_that_of_adapters_and_codes() -> None:
    model = adapted("int8")
    storages = {
        p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in _tensors(model)
    }
    linears = [m for m in model.modules() if isinstance(m, Linear) and m.lora is not None]
    codes = sum(m.weight.numel() for m in linears if m.weight is not None)
    frozen = {id(m.weight) for m in linears}
    rest = sum(p.nbytes for p in model.parameters() if id(p) not in frozen)
    assert sum(storages.values()) <= 1.1 * (codes + rest)


def _tensors(model: nn.Module) -> list[Tensor]:
    held: list[Tensor] = list(model.parameters())
    for module in model.modules():
        if isinstance(module, Linear) and isinstance(module.quantizer, FrozenWeight):
            held += [t for t in vars(module.quantizer.weight).values() if isinstance(t, Tensor)]
    return held


def test_columns_that_nvfp4_cannot_hold_are_refused() -> None:
    model = build(hidden_size=24)
    attach_adapters(model, LoraConfig(rank=4, alpha=8.0, targets=("linear_qkv",)))
    with pytest.raises(ConfigError, match=r"nvfp4: .*weight: 24 columns are no multiple of 16"):
        store_base([model], "nvfp4")

"""Which devices quantize to fp8 in kernels."""

from __future__ import annotations

import pytest
import torch

from megatron.core import device, low_precision
from megatron.core.fusions import kernels, quantize
from megatron.core.low_precision import E4M3
from tests.support import tolerances

A100 = (8, 0)
L4 = (8, 9)
H100 = (9, 0)


@pytest.fixture(autouse=True)
def no_capability_is_cached() -> None:
    device.multiplies_fp8.cache_clear()


@pytest.mark.parametrize(("capability", "has_fp8"), [(A100, False), (L4, True), (H100, True)])
def test_fp8_needs_a_compute_capability_of_8_9(
    capability: tuple[int, int], has_fp8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda where: capability)
    assert device.multiplies_fp8(torch.device("cuda", 0)) is has_fp8
    device.multiplies_fp8.cache_clear()


def test_a_gpu_without_fp8_quantizes_and_multiplies_in_plain_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Triton cannot compile its kernels for an A100."""

    def find(name: str, *tensors: torch.Tensor | None) -> None:
        pytest.fail(f"kernel {name} was asked for")

    monkeypatch.setattr(device, "launches_kernels", lambda where: True)
    monkeypatch.setattr(device, "multiplies_fp8", lambda where: False)
    monkeypatch.setattr(kernels, "find", find)
    monkeypatch.setattr(torch, "_scaled_mm", lambda *_, **__: pytest.fail("fp8 matmul"))
    x = torch.linspace(-3, 3, 32 * 128).view(32, 128).bfloat16()
    for block in (None, (1, 128)):
        found, expected = (
            f(x, E4M3, block) for f in (quantize.quantize, low_precision.plain_quantize)
        )
        torch.testing.assert_close(
            found.codes.float(), expected.codes.float(), **tolerances.BITWISE
        )
        assert not quantize.multiplies_blocks(found, found, torch.bfloat16)
        y = quantize.product(found, found, torch.bfloat16)
        z = quantize.dequantized_product(expected, expected, torch.bfloat16)
        torch.testing.assert_close(y, z, **tolerances.BITWISE)

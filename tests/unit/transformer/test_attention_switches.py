"""The switches of torch's attention kernels."""

from __future__ import annotations

import pytest
import torch

from megatron.core.transformer.attention_backends import only_kernels


def test_torch_may_use_the_chosen_kernels_only_until_a_call_ends() -> None:
    cuda = torch.backends.cuda

    def enabled() -> tuple[bool, ...]:
        return (
            cuda.flash_sdp_enabled(),
            cuda.cudnn_sdp_enabled(),
            cuda.mem_efficient_sdp_enabled(),
            cuda.math_sdp_enabled(),
        )

    before = enabled()
    with only_kernels(("flash", "efficient")):
        assert enabled() == (True, False, True, False)
        with only_kernels(("fused",)):
            assert enabled() == (False, True, False, False)
        assert enabled() == (True, False, True, False)
    with pytest.raises(ValueError, match="kernel"), only_kernels(("fused",)):
        raise ValueError("a kernel refuses")
    assert enabled() == before

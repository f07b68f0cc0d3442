"""Kernels pass gradients of their parameters to the gradient buffer as autograd would."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.fusions import rms_norm
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.params.direct_gradient import through_autograd
from megatron.core.transformer.transformer_block import TransformerBlock
from tests import tolerances
from tests.unit.autograd_graph import parameters_of_graph
from tests.unit.distributed.alone import alone as alone
from tests.unit.one_process import one_process_groups, tiny_config

S, B, H = 3, 2, 64
STYLES: dict[str, dict[str, Any]] = {
    "gpt": {"bias_activation_fusion": True},
    "llama": {"normalization": "RMSNorm", "add_bias_linear": False, "gated_linear_unit": True},
    "float32 stream": {"bias_activation_fusion": True, "fp32_residual_connection": True},
}


def wrapped(where: str, **changes: Any) -> DistributedDataParallel:
    config = tiny_config(hidden_size=H, num_layers=1, params_dtype=torch.bfloat16, **changes)
    torch.manual_seed(3)
    spec = get_gpt_layer_local_spec(config=config)
    groups = one_process_groups()
    model = TransformerBlock(config, spec, pg_collection=groups)
    for param in model.parameters():
        param.data = 0.2 * torch.randn_like(param)
    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    return DistributedDataParallel(config, ddp_config, model.to(where), pg_collection=groups)


def passes(wrapper: DistributedDataParallel, where: str, *, is_direct: bool) -> list[Tensor]:
    """Outputs and gradients of inputs of two micro-batches, and the parameters' gradients."""
    results = []
    wrapper.zero_grad_buffer()
    params = list(wrapper.parameters())
    for seed in (4, 5):
        torch.manual_seed(seed)
        x = torch.randn(S, B, H, device=where).to(torch.bfloat16).requires_grad_()
        with nullcontext() if is_direct else through_autograd(params):
            out = wrapper(x, None)
        assert isinstance(out, Tensor)
        # Those of linear layers are direct on a GPU only, where GEMMs add to main gradients.
        in_kernels = {p for n, p in wrapper.named_parameters() if "norm" in n or "fc1.bias" in n}
        assert in_kernels & parameters_of_graph(out) == (set() if is_direct else in_kernels)
        out.backward(torch.linspace(-1, 1, out.numel(), device=where).view_as(out).to(out.dtype))
        results += [out.detach(), x.grad]
    return [*results, *(p.main_grad.clone() for p in params)]


@pytest.mark.parametrize("style", STYLES)
def test_kernels_deliver_the_gradients_of_autograd(
    style: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rms_norm, "_WIDTHS", range(H, H + 1))
    wrapper = wrapped(where, **STYLES[style])
    ours = passes(wrapper, where, is_direct=True)
    expected = passes(wrapper, where, is_direct=False)
    torch.testing.assert_close(ours, expected, **tolerances.BITWISE)
    # Compared by `assert_close`, which does nothing where kernels are only compiled.
    reached = torch.stack([grad.any() for grad in ours])
    torch.testing.assert_close(reached, torch.ones_like(reached))

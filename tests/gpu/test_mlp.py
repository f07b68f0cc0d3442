"""An MLP whose activation kernel adds the bias has the values of the formula."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.activations import openai_gelu
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from tests.support import tolerances
from tests.support.one_process import one_rank, tiny_config


def test_the_kernel_of_gelu_adds_the_bias_and_sums_its_gradient(where: str) -> None:
    config = tiny_config(bias_activation_fusion=True, activation_func=F.gelu)
    slots = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    mlp = MLP(config, slots, tp_group=one_rank()).to(where)
    params = dict(mlp.named_parameters())
    for param in params.values():
        nn.init.normal_(param, std=0.1)
    x = torch.randn(5, 2, config.hidden_size, device=where)
    assert mlp.linear_fc1.skip_bias_add
    assert mlp.linear_fc1(x)[1] is params["linear_fc1.bias"]
    out, _ = mlp(x)
    out.square().mean().backward()
    wide = {name: p.detach().double().requires_grad_() for name, p in params.items()}

    def product(x: Tensor, name: str) -> Tensor:
        return F.linear(x, wide[f"{name}.weight"], wide[f"{name}.bias"])

    expected = product(openai_gelu(product(x.double(), "linear_fc1")), "linear_fc2")
    expected.square().mean().backward()
    torch.testing.assert_close(out.double(), expected, **tolerances.LOGITS)
    for name, param in params.items():
        torch.testing.assert_close(param.grad.double(), wide[name].grad, **tolerances.LOGITS)

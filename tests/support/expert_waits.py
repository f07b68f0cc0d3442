"""Count the host's waits in layers of experts on a GPU; compare with counts that the host reads.

python -m tests.support.host_gpu tests/support/expert_waits.py
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from megatron.core import device
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.params.param_info import name_parameters
from megatron.core.params.param_init import initialize_parameters
from megatron.core.transformer.moe import token_dispatcher
from megatron.core.transformer.spec_utils import build_module
from tests.support.host_gpu import torch_cuda
from tests.support.one_process import one_process_groups, tiny_config

DROPPING = {"moe_expert_capacity_factor": 0.7}
BIASED = {"add_bias_linear": True}
CASES: dict[str, dict[str, Any]] = {
    "no capacity": {},
    "capacity": DROPPING,
    "capacity by position": {**DROPPING, "moe_token_drop_policy": "position"},
    "capacity above all tokens": {"moe_expert_capacity_factor": 9.0},
    "padded capacity": {**DROPPING, "moe_pad_expert_input_to_capacity": True},
    "biases": BIASED,
    "biases and capacity": {**BIASED, **DROPPING},
    "biases and padded capacity": {
        **BIASED,
        **DROPPING,
        "moe_pad_expert_input_to_capacity": True,
    },
    "weights on inputs": {
        **DROPPING,
        "moe_apply_probs_on_input": True,
        "moe_router_topk": 1,
        "moe_router_pre_softmax": True,
    },
    "padding among the tokens": {"has_padding": True},
    "recomputed": {
        **DROPPING,
        "recompute_granularity": "selective",
        "recompute_modules": ["moe_act"],
    },
    "without the flag": {"moe_grouped_gemm": False},
    "one by one, in fp32": {
        **DROPPING,
        "params_dtype": torch.float32,
        "moe_router_dtype": None,
    },
}


def run(case: dict[str, Any]) -> tuple[list[Tensor], int]:
    """Return the output and all gradients of two micro-batches, and the waits of the second."""
    settings: dict[str, Any] = {
        "num_moe_experts": 4,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 48,
        "moe_grouped_gemm": True,
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "params_dtype": torch.bfloat16,
    }
    settings |= case
    has_padding = settings.pop("has_padding", False)
    config = tiny_config(**settings)
    spec: Any = get_gpt_layer_local_spec(4, config=config).submodules
    offered = {"pg_collection": one_process_groups(), "layer_number": 1}
    with torch.device("cuda"):
        layer = build_module(spec.mlp, config=config, offered=offered)
    name_parameters(layer)
    initialize_parameters(layer, 1)
    found = []
    for batch in range(2):
        for param in layer.parameters():
            if batch == 0 and param.dim() == 1:
                param.data.normal_()
            param.grad = None
        generator = torch.Generator().manual_seed(batch)
        x, grad = torch.randn(2, 24, 2, 32, generator=generator).to("cuda", config.params_dtype)
        x.requires_grad_()
        padding = torch.zeros(2, 24, dtype=torch.bool, device="cuda") if has_padding else None
        if padding is not None:
            padding[0, 9:] = True
        before = torch_cuda.waits()
        y, _ = layer(x, padding)
        y.backward(grad)
        waits: int = torch_cuda.waits() - before
        assert x.grad is not None
        grads = {name: param.grad for name, param in layer.named_parameters()}
        assert all(value is not None for value in grads.values()), grads
        found += [y.detach(), x.grad, *grads.values()]
    return found, waits


def main() -> None:
    """Print the waits of each case; raise where a value depends on who reads the counts."""
    device.choose("cuda")
    result = {}
    read_by_host = token_dispatcher.is_in_a_gpu
    for name, case in CASES.items():
        torch.manual_seed(0)
        found, result[name] = run(case)
        token_dispatcher.is_in_a_gpu = lambda x: False
        torch.manual_seed(0)
        wanted, _ = run(case)
        token_dispatcher.is_in_a_gpu = read_by_host
        for ours, theirs in zip(found, wanted, strict=True):
            assert not ours.isnan().any(), name
            assert torch.equal(ours, theirs), name
    print(json.dumps(result))


main()

"""Compare a layer of experts with transformers' layer and with its matmuls alone.

    python -m benchmarks.moe [--rounds 9] [--tokens 512] [--device cpu] [--layer coarse|fine]

Measures forward and backward passes of one layer: 8 wide experts with top-2 routing (Mixtral's
shape), and 64 narrow ones with top-8 (Qwen3-MoE's).  The floor is the matmuls of the experts at
equal load, once forward and twice backward, with rows already sorted by expert.  Contenders
alternate in one process that keeps freed memory; results are medians, on a CPU of CPU time of one
thread, on a GPU of time on the device.  Dated results are in moe.md.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.core import device
from megatron.core.device import cpu_tuning
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.parallel.process_groups_config import create_process_groups, make_grids
from megatron.core.params.param_info import name_parameters
from megatron.core.params.param_init import initialize_parameters
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass(frozen=True)
class Shape:
    """Sizes of a layer; ``visits`` is the number of experts per token."""

    hidden: int
    inner: int
    experts: int
    visits: int


SHAPES = {"coarse": Shape(1024, 3584, 8, 2), "fine": Shape(1024, 512, 64, 8)}
KINDS = ("eager", "grouped_mm")  # matmul implementations of transformers


def ours(shape: Shape, dtype: torch.dtype) -> nn.Module:
    """Build our layer, with parameters named and initialized as in a run."""
    config = TransformerConfig(
        num_layers=1,
        hidden_size=shape.hidden,
        num_attention_heads=8,
        ffn_hidden_size=shape.inner,
        num_moe_experts=shape.experts,
        moe_router_topk=shape.visits,
        moe_router_load_balancing_type=("none",),
        moe_grouped_gemm=True,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
    )
    spec = get_gpt_layer_local_spec(shape.experts, config=config).submodules.mlp
    groups = create_process_groups(*make_grids(1))
    layer: MoELayer = build_module(
        spec, config=config, offered={"pg_collection": groups, "layer_number": 1}
    )
    name_parameters(layer)
    initialize_parameters(layer, 1234)
    return layer


def theirs(shape: Shape, dtype: torch.dtype, weights_of: nn.Module, kind: str) -> nn.Module:
    """Build transformers' layer with the same weights; ``kind`` is its matmul implementation."""
    from transformers.models.mixtral.configuration_mixtral import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    config = MixtralConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_local_experts=shape.experts,
        num_experts_per_tok=shape.visits,
        router_jitter_noise=0.0,
    )
    config._experts_implementation = kind
    layer = MixtralSparseMoeBlock(config).to(dtype)
    found = dict(weights_of.named_parameters())
    with torch.no_grad():
        layer.gate.weight.copy_(found["router.weight"])
        for name, ours_name in (("gate_up_proj", "linear_fc1"), ("down_proj", "linear_fc2")):
            for number in range(shape.experts):
                weight = found[f"experts.local_experts.{number}.{ours_name}.weight"]
                getattr(layer.experts, name)[number].copy_(weight)
    return layer


def passes(layer: nn.Module, x: Tensor, grad: Tensor) -> Callable[[], Tensor]:
    """Return a function that runs forward and backward, and returns the layer's output."""

    def work() -> Tensor:
        layer.zero_grad(set_to_none=True)
        x.grad = None
        found = layer(x)
        y: Tensor = found[0] if isinstance(found, tuple) else found
        y.backward(grad)
        return y

    return work


def floor(shape: Shape, tokens: int, dtype: torch.dtype) -> Callable[[], None]:
    """Return a function that runs the matmuls alone, at equal load, three per weight matrix."""
    rows = tokens * shape.visits // shape.experts
    of = {"dtype": dtype, "device": device.current()}
    x = torch.randn(rows, shape.hidden, **of)
    inner = torch.randn(rows, 2 * shape.inner, **of)
    activated = inner[:, : shape.inner].contiguous()
    wide = torch.randn(shape.experts, 2 * shape.inner, shape.hidden, **of)
    narrow = torch.randn(shape.experts, shape.hidden, shape.inner, **of)
    weights = list(zip(wide, narrow, torch.empty_like(wide), torch.empty_like(narrow), strict=True))

    def work() -> None:
        for first, second, *_ in weights:
            F.linear(x, first)
            F.linear(activated, second)
        for first, second, first_grad, second_grad in reversed(weights):
            torch.mm(x.t(), activated, out=second_grad)
            x.matmul(second)
            torch.mm(inner.t(), x, out=first_grad)
            inner.matmul(first)

    return work


def medians(contenders: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the median seconds of each contender; they run alternately."""
    seen: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds + 1):
        for name, work in contenders.items():
            device.synchronize()
            began, began_cpu_s = device.moment(), time.process_time()
            work()
            on_gpu_s = device.seconds_between(began, device.moment())
            if turn:
                cpu_s = time.process_time() - began_cpu_s
                seen[name].append(on_gpu_s if device.is_cuda() else cpu_s)
    return {name: statistics.median(times) for name, times in seen.items()}


def compare(name: str, dtype: torch.dtype, tokens: int, rounds: int) -> None:
    """Print one row of the table."""
    shape, where = SHAPES[name], device.current()
    layer = ours(shape, dtype)
    peers = {kind: theirs(shape, dtype, layer, kind).to(where) for kind in KINDS}
    x = torch.randn(1, tokens, shape.hidden, dtype=dtype, device=where, requires_grad=True)
    grad = torch.randn_like(x)
    contenders: dict[str, Callable[[], Tensor]] = {
        "ours": passes(layer, x, grad),
        **{kind: passes(peer, x, grad) for kind, peer in peers.items()},
    }
    found = contenders["ours"]().float(), contenders[KINDS[0]]().float()
    apart = ((found[0] - found[1]).norm() / found[1].norm()).item()
    times = medians({**contenders, "floor": floor(shape, tokens, dtype)}, rounds)
    mine = times["ours"]
    print(
        f"| {name} | {str(dtype).removeprefix('torch.')} | {tokens / mine:.0f} "
        f"| {' | '.join(f'{times[kind] / mine:.2f}' for kind in KINDS)} "
        f"| {times['floor'] / mine:.2f} | {apart:.1e} |",
        flush=True,
    )


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--layer", choices=list(SHAPES))
    args = parser.parse_args()
    device.choose(args.device)
    cpu_tuning.keep_freed_memory()  # as a run does, for all contenders
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    print(f"{device.name()}, torch {torch.__version__}, {args.tokens} tokens")
    peers = " | ".join(f"transformers {kind} / ours" for kind in KINDS)
    print(f"| layer | dtype | tokens/s | {peers} | floor / ours | values apart |")
    print("|---|---|---|---|---|---|---|")
    for name in [args.layer] if args.layer else SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            compare(name, dtype, args.tokens, args.rounds)


if __name__ == "__main__":
    main()

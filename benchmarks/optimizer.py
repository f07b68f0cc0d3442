"""Time one update of all parameters: norm, clipping, step, and copy to the model's dtype.

    python -m benchmarks.optimizer [--shape 30m 124m] [--rounds 9]

Compares our optimizer with ``clip_grad_norm_`` and ``torch.optim.AdamW`` over the parameters of a
GPT.  Contenders alternate; results are medians of CPU time of one thread, next to the time of
copying as many bytes as the update has to move.  Dated results are in optimizer.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.peers import ADAM, CLIP, SHAPES, WEIGHT_DECAY, weights
from benchmarks.weight_gradient import medians
from megatron.core.device import cpu_tuning
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.parallel.process_groups_config import create_process_groups, make_grids

_AWARE = {"use_precision_aware_optimizer": True}
# Name -> dtype of weights, dtype of gradients, bytes moved per parameter, flags.
OURS: dict[str, tuple[torch.dtype, torch.dtype, int, dict[str, Any]]] = {
    "float32": (torch.float32, torch.float32, 32, {}),
    "bfloat16, float32 beside": (torch.bfloat16, torch.bfloat16, 30, {}),
    "bfloat16 and 16 bits": (torch.bfloat16, torch.bfloat16, 28, _AWARE),
    "the same, moments in bfloat16": (
        torch.bfloat16,
        torch.bfloat16,
        20,
        {**_AWARE, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"},
    ),
}


def _model(shape: str, dtype: torch.dtype) -> nn.Module:
    model = nn.Module()
    for number, tensor in enumerate(weights(SHAPES[shape]).values()):
        model.register_parameter(str(number), nn.Parameter(tensor.to(dtype)))
    return model


def ours(shape: str, dtype: torch.dtype, grad_dtype: torch.dtype, flags: dict[str, Any]) -> Any:
    """Return a step of our optimizer."""
    model = _model(shape, dtype)
    config = OptimizerConfig(
        lr=ADAM["lr"],
        adam_beta1=ADAM["betas"][0],
        adam_beta2=ADAM["betas"][1],
        weight_decay=WEIGHT_DECAY,
        clip_grad=CLIP,
        **flags,
    )
    groups = create_process_groups(*make_grids(1))
    optimizer = get_megatron_optimizer(config, [model], pg_collection=groups)
    params = list(model.parameters())
    grads = _gradients(params, grad_dtype)

    def step() -> None:
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        optimizer.step()

    return step


def torchs(shape: str, **how: bool) -> Callable[[], None]:
    """Return a step of PyTorch's AdamW in float32."""
    params = list(_model(shape, torch.float32).parameters())
    adam = torch.optim.AdamW(params, weight_decay=WEIGHT_DECAY, **ADAM, **how)
    for param, grad in zip(params, _gradients(params, torch.float32), strict=True):
        param.grad = grad

    def step() -> None:
        nn.utils.clip_grad_norm_(params, CLIP)
        adam.step()

    return step


def _gradients(params: list[nn.Parameter], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(p.shape, generator=generator).to(dtype) for p in params]


def main() -> None:
    """Print the rows of optimizer.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", nargs="+", default=["30m", "124m"], choices=SHAPES)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(1)
    cpu_tuning.keep_freed_memory()  # as a run does, for all contenders
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    print(
        "| shape | update | ms | of torch's fused | of a copy of the bytes |\n|---|---|---|---|---|"
    )
    for shape in args.shape:
        numel = sum(tensor.numel() for tensor in weights(SHAPES[shape]).values())
        moved = {name: num_bytes for name, (_, _, num_bytes, _) in OURS.items()}
        contenders: dict[str, Callable[[], object]] = {
            "torch, fused": torchs(shape, fused=True),
            "torch, foreach": torchs(shape, foreach=True),
            **{name: ours(shape, *kind[:2], kind[3]) for name, kind in OURS.items()},
        }
        source, target = torch.zeros(numel), torch.ones(numel)
        contenders["copy"] = lambda source=source, target=target: target.copy_(source)
        found = medians(contenders, args.rounds)
        copied = found.pop("copy") / 8  # time per byte of each parameter
        for name, ms in found.items():
            share = ms / found["torch, fused"]
            floor = ms / copied / moved.get(name, 32)
            print(f"| {shape} | {name} | {ms:.0f} | {share:.2f} | {floor:.2f} |")


if __name__ == "__main__":
    main()

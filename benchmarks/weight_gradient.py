"""Measure the gain of adding a weight gradient's matmul directly to the main gradient.

    python -m benchmarks.weight_gradient [--rounds 15]

Measures the forward and backward passes of a step of a small GPT with float32 gradient buffers, and
single matmuls with 16-bit operands.  Contenders alternate; results are medians of CPU time of one
thread.  Dated results are in weight_gradient.md.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from itertools import product

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.grad_buffer import add_into
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.parallel.process_groups_config import create_process_groups, make_grids
from megatron.core.transformer.transformer_config import TransformerConfig

_VOCABULARY, _TOKENS, _MICROBATCHES = 8192, 256, 4
_ROWS_IN_CACHE = 2**18  # elements of a block of the result


def medians(contenders: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the median milliseconds of CPU time of each contender; they run alternately."""
    seen: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds + 1):
        for name, work in contenders.items():
            started_at_s = time.process_time()
            work()
            if turn:
                seen[name].append(time.process_time() - started_at_s)
    return {name: 1e3 * statistics.median(times) for name, times in seen.items()}


def gpt_step(*, fused: bool, dtype: torch.dtype) -> Callable[[], None]:
    """Return a step of micro-batches under DDP, on the first of two data-parallel ranks."""
    config = TransformerConfig(
        num_layers=6,
        hidden_size=384,
        num_attention_heads=6,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        gradient_accumulation_fusion=fused,
    )
    groups = create_process_groups(*make_grids(2))
    spec = get_gpt_layer_local_spec(config=config)
    model = GPTModel(config, spec, _VOCABULARY, _TOKENS, pg_collection=groups)
    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=dtype == torch.float32)
    wrapper = DistributedDataParallel(config, ddp_config, model, pg_collection=groups)
    ids = torch.randint(_VOCABULARY, (1, _TOKENS + 1))
    positions = torch.arange(_TOKENS)[None]

    def step() -> None:
        wrapper.zero_grad_buffer()
        for _ in range(_MICROBATCHES):
            wrapper(ids[:, :-1], positions, None, labels=ids[:, 1:]).mean().backward()
        wrapper.finish_grad_sync()

    return step


def mixed_products(tokens: int, outputs: int, inputs: int) -> dict[str, Callable[[], object]]:
    """Return ways to add a matmul of bfloat16 matrices to a float32 sum."""
    grad = torch.randn(tokens, outputs).bfloat16().t()
    x, total = torch.randn(tokens, inputs).bfloat16(), torch.zeros(outputs, inputs)

    def in_blocks() -> None:
        rows = max(1, _ROWS_IN_CACHE // inputs)
        narrow, wide = x.new_empty(rows, inputs), total.new_empty(rows, inputs)
        for part, to in zip(grad.split(rows), total.split(rows), strict=True):
            torch.mm(part, x, out=narrow[: len(to)])
            to.add_(wide[: len(to)].copy_(narrow[: len(to)]))

    def widened() -> Tensor:
        return total.addmm_(grad.float(), x.float())

    def apart() -> None:
        add_into(total, grad.matmul(x))

    return {"apart": apart, "float32 operands": widened, "in blocks": in_blocks}


def main() -> None:
    """Print the rows of weight_gradient.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    print("| step, gradients in the parameters' dtype | apart ms | fused ms | fused / apart |")
    print("|---|---|---|---|")
    for dtype in (torch.float32, torch.bfloat16):
        ways = {str(fused): gpt_step(fused=fused, dtype=dtype) for fused in (False, True)}
        apart, fused = medians(ways, args.rounds).values()
        print(f"| {dtype} | {apart:.1f} | {fused:.1f} | {fused / apart:.3f} |")
    print("\n| bfloat16 product into float32 | apart ms | float32 operands | in blocks |")
    print("|---|---|---|---|")
    for tokens, (outputs, inputs) in product((256, 1024), ((768, 768), (3072, 768), (768, 3072))):
        found = medians(mixed_products(tokens, outputs, inputs), args.rounds)
        apart = found.pop("apart")
        others = " | ".join(f"{ms / apart:.2f}" for ms in found.values())
        print(f"| [{outputs}, {tokens}] [{tokens}, {inputs}] | {apart:.2f} | {others} |")


if __name__ == "__main__":
    main()

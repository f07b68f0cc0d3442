"""Print how often the host waits for the device in each decode step of some requests.

python -m tests.support.host_gpu tests/support/decode_waits.py
"""

from __future__ import annotations

import json
from typing import Any

import torch.distributed as dist

from megatron.core import device
from megatron.core.inference.paged_engine.engine import EngineOptions
from megatron.core.inference.paged_engine.request import Request
from megatron.core.inference.paged_engine.runner import ModelRunner
from megatron.core.inference.sampling_params import SamplingParams
from tests.support.host_gpu import torch_cuda
from tests.unit.inference.test_engine import engine

LENGTH = 38
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8, "top_k": 5, "seed": 1},
    "nucleus": {"temperature": 0.9, "top_p": 0.7, "min_p": 0.01, "seed": 2},
    "penalties": {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.2},
    "bias": {"temperature": 0.0, "logit_bias": {5: 1.0}, "min_tokens": LENGTH - 4},
    "log-probs": {"temperature": 0.0, "return_log_probs": True, "top_n_logprobs": 3},
}


def steps_of(made: Any, params: list[dict[str, Any]]) -> list[int]:
    counts: list[int] = []
    execute = ModelRunner.execute

    def counted(runner: ModelRunner, plan: Any) -> Any:
        before = torch_cuda.waits()
        result = execute(runner, plan)
        if plan.segments and all(s.start and len(s.tokens) == 1 for s in plan.segments):
            counts.append(torch_cuda.waits() - before)
        return result

    ModelRunner.execute = counted  # type: ignore[method-assign]
    try:
        made.generate(
            [
                Request(
                    f"{i}",
                    [3 + i],
                    SamplingParams(
                        num_tokens_to_generate=LENGTH - 1, ignore_eos=True, **{"seed": i, **p}
                    ),
                )
                for i, p in enumerate(params)
            ]
        )
    finally:
        ModelRunner.execute = execute  # type: ignore[method-assign]
    return counts


def main() -> None:
    """Print the counts of each kind of request, and of all together."""
    device.choose("cuda")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    found = {}
    for name, kinds in [*((n, [p]) for n, p in KINDS.items()), ("all", list(KINDS.values()))]:
        made = engine(EngineOptions(max_requests=8, has_prefix_cache=False), 1, {})
        found[name] = steps_of(made, kinds)
    print(json.dumps(found))


main()

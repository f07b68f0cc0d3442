"""Generate text for prompts that arrive one after the other, with Megatron Core's dynamic engine.

    python examples/inference/gpt/gpt_dynamic_inference.py --load checkpoints \\
        --use-checkpoint-args --prompts "def main(" "import" --steps-between-arrivals 4
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # installed or not

from examples.inference.common import (
    add_flags,
    prompts,
    report,
    sampling_params,
    start,
    with_engine_flags,
    wrapper_config,
)
from megatron.core import device
from megatron.core.inference.contexts import DynamicInferenceContext
from megatron.core.inference.engines import DynamicInferenceEngine
from megatron.core.inference.inference_request import DynamicInferenceRequest
from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import (
    GPTInferenceWrapper,
)
from megatron.core.inference.text_generation_controllers.text_generation_controller import (
    TextGenerationController,
)
from megatron.training import get_args, get_tokenizer, print_rank_0
from pretrain_gpt import model_provider


def add_arrival_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags of prompts and sampling, and when prompts without a time arrive."""
    parser.add_argument("--steps-between-arrivals", type=int, default=2)
    return add_flags(parser)


def make_context() -> DynamicInferenceContext:
    """Return the context that the --inference-dynamic-batching-* flags ask for."""
    args = get_args()
    context = DynamicInferenceContext(
        params_dtype=args.params_dtype,
        num_layers=args.num_layers,
        kv_channels=args.kv_channels,
        num_attention_heads=args.num_attention_heads,
        max_sequence_length=args.inference_max_seq_length,
        buffer_size_gb=args.inference_dynamic_batching_buffer_size_gb,
        buffer_guaranteed_fraction=args.inference_dynamic_batching_buffer_guaranteed_fraction,
        chunk_size_tokens=args.inference_dynamic_batching_chunk_size,
        buffer_overflow_factor=args.inference_dynamic_batching_buffer_overflow_factor,
        max_requests_override=args.inference_dynamic_batching_max_requests_override,
        max_tokens_override=args.inference_dynamic_batching_max_tokens_override,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
    )
    context.options = with_engine_flags(context.options)
    return context


def now() -> float:
    """Return rank 0's time in seconds: all ranks must add the same requests.  Collective."""
    nanoseconds = torch.tensor(time.time_ns(), device=device.current())
    dist.broadcast(nanoseconds, 0)
    return int(nanoseconds) / 1e9


def main(*, records_throughput: bool = False) -> None:
    """Load the model, generate while prompts arrive, and report."""
    model = start(model_provider, add=add_arrival_flags, records_throughput=records_throughput)
    wrapped = GPTInferenceWrapper(model, wrapper_config())
    args = get_args()
    controller = TextGenerationController(wrapped, get_tokenizer())
    engine = DynamicInferenceEngine(
        controller, make_context(), None, enable_cuda_graph=args.enable_cuda_graph
    )
    arrivals = prompts()
    for _ in range(args.inference_repeat_n):
        begin = now()
        finished, latency = generate(engine, arrivals, begin)
        report(finished, latency, now() - begin)


def generate(
    engine: DynamicInferenceEngine, arrivals: list[tuple[float, str]], begin: float
) -> tuple[list[DynamicInferenceRequest], dict[int, float]]:
    """Generate while prompts arrive; return the finished requests, and the seconds of each."""
    args = get_args()
    params = sampling_params()
    per_step = args.incoming_requests_per_step
    waiting = deque(enumerate(arrivals))
    finished: list[DynamicInferenceRequest] = []
    added: dict[int, float] = {}
    latency: dict[int, float] = {}
    num_steps = 0
    while waiting or engine.has_unfinished_requests():
        second = now() - begin
        while waiting:
            number, (arrival, prompt) = waiting[0]
            step = number * args.steps_between_arrivals if per_step is None else number // per_step
            if arrival > second or (not arrival and step > num_steps):
                break
            engine.add_request(number, prompt, args.num_tokens_to_generate)
            added[number] = second
            waiting.popleft()
        if not engine.has_unfinished_requests():
            time.sleep(0.001)  # until the next one arrives
            num_steps += 1
            continue
        _, ended, seconds = engine.step(params)
        finished += ended
        num_steps += 1
        for request in ended:
            latency[request.request_id] = now() - begin - added[request.request_id]
            print_rank_0(f"step {num_steps} ({seconds:.4f} s): request {request.request_id} ended")
    return sorted(finished, key=lambda request: request.request_id), latency


if __name__ == "__main__":
    main()

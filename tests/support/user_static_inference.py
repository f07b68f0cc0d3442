"""A user's script with the structure of Megatron-LM's `gpt_static_inference.py`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import torch

from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.inference.engines import StaticInferenceEngine
from megatron.core.inference.inference_request import InferenceRequest
from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import (
    GPTInferenceWrapper,
)
from megatron.core.inference.model_inference_wrappers.inference_wrapper_config import (
    InferenceWrapperConfig,
)
from megatron.core.inference.sampling_params import SamplingParams
from megatron.core.inference.text_generation_controllers.text_generation_controller import (
    TextGenerationController,
)
from megatron.training import get_args, get_tokenizer
from megatron.training.initialize import initialize_megatron
from tests.support import user_inference as shared


def make_engine(args: Any, model: torch.nn.Module) -> StaticInferenceEngine:
    config = InferenceWrapperConfig(
        hidden_size=args.hidden_size,
        inference_batch_times_seqlen_threshold=args.inference_batch_times_seqlen_threshold,
        fp32_residual_connection=args.fp32_residual_connection,
        params_dtype=args.params_dtype,
        padded_vocab_size=args.padded_vocab_size,
        inference_max_requests=args.inference_max_batch_size,
        inference_max_seq_length=args.inference_max_seq_length,
        nccl_all_reduce_for_prefill=args.nccl_all_reduce_for_prefill,
        fp8=args.fp8,
    )
    wrapped = GPTInferenceWrapper(model, config, StaticInferenceContext.from_config(config))
    controller = TextGenerationController(
        inference_wrapped_model=wrapped, tokenizer=get_tokenizer()
    )
    return StaticInferenceEngine(text_generation_controller=controller)


async def stream(
    engine: StaticInferenceEngine, params: SamplingParams, prompts: Sequence[str]
) -> list[InferenceRequest]:
    """Generate, reading the text of every request while it grows."""
    ids = [engine.add_request(prompt=p, sampling_params=params, streaming=True) for p in prompts]

    async def read(request_id: int) -> None:
        shown = 0
        async for partial in engine.get_stream_generator(request_id):
            print(partial.generated_text[shown:], end="", flush=True)
            shown = len(partial.generated_text)

    readers = [asyncio.create_task(read(request_id)) for request_id in ids]
    await engine.run_engine_async()
    await asyncio.gather(*readers)
    return [engine.scheduler.completed_request_pool[request_id] for request_id in ids]


@torch.inference_mode()
def main() -> None:
    initialize_megatron(
        extra_args_provider=shared.add_flags,
        args_defaults={
            "no_load_rng": True,
            "no_load_optim": True,
            "micro_batch_size": 1,
            "exit_on_missing_checkpoint": True,
        },
    )
    args = get_args()
    engine = make_engine(args, shared.load_model())
    params = shared.sampling_params()
    prompts = shared.prompts()
    if args.enable_cuda_graph:
        warmup = SamplingParams(num_tokens_to_generate=2)
        engine.generate(prompts=["1"], sampling_params=warmup)
    started = time.perf_counter()
    if args.stream:
        results = asyncio.run(stream(engine, params, prompts))
    else:
        results = engine.generate(prompts=prompts, sampling_params=params)
    latency = time.perf_counter() - started
    shared.write({r.request_id: shared.answer_of(r, latency) for r in results})


if __name__ == "__main__":
    main()

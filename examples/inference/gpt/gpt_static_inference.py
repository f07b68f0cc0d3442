"""Generate text for prompts that are known beforehand, with Megatron Core's static engine.

    torchrun --nproc-per-node 2 examples/inference/gpt/gpt_static_inference.py \\
        --tensor-model-parallel-size 2 --load checkpoints --use-checkpoint-args \\
        --prompts "def main(" "import" --num-tokens-to-generate 32
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # installed or not

from examples.inference.common import (
    generate,
    prompts,
    sampling_params,
    start,
    with_engine_flags,
    wrapper_config,
)
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.inference.engines import StaticInferenceEngine
from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import (
    GPTInferenceWrapper,
)
from megatron.core.inference.text_generation_controllers.text_generation_controller import (
    TextGenerationController,
)
from megatron.training import get_args, get_tokenizer, print_rank_0
from pretrain_gpt import model_provider


def main(model_kind: str | None = None, *, records_throughput: bool = False) -> None:
    """Load the model, generate and report."""
    model = start(model_provider, model_kind, records_throughput=records_throughput)
    config = wrapper_config()
    wrapped = GPTInferenceWrapper(model, config, StaticInferenceContext.from_config(config))
    controller = TextGenerationController(wrapped, get_tokenizer())
    controller.options = with_engine_flags(controller.options)
    engine = StaticInferenceEngine(controller, max_batch_size=get_args().max_batch_size)
    texts = [text for _, text in prompts()]
    if get_args().stream:
        asyncio.run(stream(engine, texts[0]))
    generate(engine, prompts=texts)


async def stream(engine: StaticInferenceEngine, prompt: str) -> None:
    """Print the text of one prompt after each token."""
    request_id = engine.add_request(prompt, sampling_params=sampling_params(), streaming=True)
    texts = engine.get_stream_generator(request_id)
    generation = asyncio.create_task(engine.run_engine_async())
    async for partial in texts:
        print_rank_0(f"{partial.generated_length}: {partial.generated_text!r}")
    await generation


if __name__ == "__main__":
    main()

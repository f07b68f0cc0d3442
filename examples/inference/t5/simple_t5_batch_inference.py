"""Generate text with T5: the encoder reads --encoder-prompts, the decoder continues --prompts.

    python examples/inference/t5/simple_t5_batch_inference.py --load checkpoints \\
        --use-checkpoint-args --prompts "" --encoder-prompts "the <extra_id_0> of the world"
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # installed or not

from examples.inference.common import generate, start, wrapper_config
from megatron.core.inference.engines import StaticInferenceEngine
from megatron.core.inference.model_inference_wrappers.t5.t5_inference_wrapper import (
    T5InferenceWrapper,
)
from megatron.core.inference.text_generation_controllers import (
    encoder_decoder_text_generation_controller as controllers,
)
from megatron.training import get_args, get_tokenizer
from pretrain_t5 import model_provider


def main() -> None:
    """Load the model, generate and report."""
    model = start(model_provider, "t5")
    args = get_args()
    wrapped = T5InferenceWrapper(model, wrapper_config())
    controller = controllers.EncoderDecoderTextGenerationController(wrapped, get_tokenizer())
    engine = StaticInferenceEngine(controller, max_batch_size=args.max_batch_size)
    generate(engine, prompts=args.prompts, encoder_prompts=args.encoder_prompts)


if __name__ == "__main__":
    main()

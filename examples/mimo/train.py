"""Train a MiMo model: encoders of images, videos or sound with a language model.

torchrun --nproc-per-node 8 examples/mimo/train.py --model-provider llava_vlm ...
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # installed or not

from megatron.training.process import early_sigterm  # before the imports that take seconds

if __name__ == "__main__":
    early_sigterm.begin_imports()

# isort: split
from megatron.core.enums import ModelType
from megatron.core.models.mimo import MimoModel
from megatron.training.conversion.vision import load_parts
from megatron.training.global_vars import get_run
from megatron.training.runtime.setup import build_stage
from megatron.training.training import pretrain
from pretrain_vlm import forward_step, train_valid_test_datasets_provider


def model_provider(
    pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None
) -> MimoModel:
    """This rank's stage of the model, with the weights that flags give to its parts."""
    run = get_run()
    model = build_stage(run, pre_process=pre_process, post_process=post_process, vp_stage=vp_stage)
    return load_parts(model, run.config)


if __name__ == "__main__":
    early_sigterm.end_imports()
    train_valid_test_datasets_provider.is_distributed = True  # type: ignore[attr-defined]
    pretrain(
        train_valid_test_datasets_provider,
        model_provider,
        ModelType.encoder_and_decoder,
        forward_step,
        args_defaults={"model_kind": "mimo", "tokenizer_type": "GPT2BPETokenizer"},
    )

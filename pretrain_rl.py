"""Train GPT by reinforcement learning (GRPO): environments reward answers of the model.

The model and the forward step are those of pretrain_gpt.py; rollouts take the place of data sets.
"""

from __future__ import annotations

from megatron.training.process import early_sigterm  # before the imports that take seconds

if __name__ == "__main__":
    early_sigterm.begin_imports()

# isort: split
from collections.abc import Sequence

from megatron.core.enums import ModelType
from megatron.post_training.rl.trainer import RolloutTraining, rollout_metrics
from megatron.training.callbacks import register_metric
from megatron.training.training import pretrain
from pretrain_gpt import forward_step, model_provider


def train_valid_test_datasets_provider(num_samples: Sequence[int | None]) -> tuple[None, ...]:
    """Return no data sets: a callback generates the rollouts."""
    del num_samples
    return None, None, None


def main() -> None:
    """Parse the command line and train."""
    register_metric("rollouts", rollout_metrics)
    pretrain(
        train_valid_test_datasets_provider,
        model_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        args_defaults={
            "model_kind": "gpt",
            "tokenizer_type": "GPT2BPETokenizer",
            "dataloader_type": "external",
            "perform_rl_step": True,
        },
        callbacks=[RolloutTraining()],
    )


if __name__ == "__main__":
    early_sigterm.end_imports()
    main()

"""Fine-tune a Hugging Face folder or a checkpoint on conversations: pretrain_gpt.py with --sft.

    torchrun --nproc-per-node 2 examples/post_training/modelopt/finetune.py \\
        --tensor-model-parallel-size 2 --load CHECKPOINT --save TUNED \\
        --finetune-hf-dataset chats.jsonl --train-iters 100 --lr 1e-5

A quantized checkpoint stays quantized: its weights learn to be rounded.  With
--export-kd-teacher-load the model also learns from a teacher.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # installed or not

from examples.post_training.modelopt.common import run, split_paths
from megatron.core.config.errors import ConfigError
from megatron.core.enums import ModelType
from megatron.training.training import pretrain
from pretrain_gpt import forward_step, model_provider, train_valid_test_datasets_provider

_FLAG = "--finetune-hf-dataset"


def command_line(words: list[str]) -> list[str]:
    """Return the command line of pretrain_gpt.py.  Raises ConfigError, DataError."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(_FLAG)
    parser.add_argument("--finetune-data-split", default="train")
    own, rest = parser.parse_known_args(words)
    name = own.finetune_hf_dataset
    if name is None:
        raise ConfigError(
            f"{_FLAG} is missing: give a file of conversations in JSON lines, a folder of "
            "`datasets`, or a data set of the Hugging Face hub"
        )
    split = own.finetune_data_split
    has_splits = split == "train" and Path(name, "dataset_dict.json").exists()
    paths = [name] if has_splits else split_paths(name, split, _FLAG)
    return ["--sft", "--finetune", "--use-checkpoint-args", *rest, "--data-path", *paths]


def main() -> None:
    """Fine-tune."""
    if not {"-h", "--help", "--help-all"} & {*sys.argv}:
        sys.argv[1:] = command_line(sys.argv[1:])
    train_valid_test_datasets_provider.is_distributed = True  # type: ignore[attr-defined]
    pretrain(
        train_valid_test_datasets_provider,
        model_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        args_defaults={"model_kind": "gpt", "tokenizer_type": "GPT2BPETokenizer"},
    )


if __name__ == "__main__":
    run(main)

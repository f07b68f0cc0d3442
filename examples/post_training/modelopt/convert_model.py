"""Write a Hugging Face folder, or a checkpoint, as a checkpoint of this layout.

    torchrun --nproc-per-node 2 examples/post_training/modelopt/convert_model.py \\
        --tensor-model-parallel-size 2 --pretrained-model-path HF_FOLDER --save CHECKPOINT

With --export-num-medusa-heads or --export-num-eagle-layers the checkpoint holds new draft heads of
the model, which finetune.py trains.  With --extra-model-path it holds the trained heads of a
folder.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # installed or not

from examples.post_training.modelopt.common import add_model_path, load_model, parse, run
from megatron.core.config.errors import ConfigError
from megatron.training.checkpointing import save_checkpoint
from megatron.training.checkpointing.model_folder_args import local_folder
from megatron.training.conversion import draft_heads, hf_folder
from megatron.training.conversion.convert import ConversionRequest, convert
from megatron.training.conversion.source import BESIDE
from megatron.training.process.rank_print import is_rank0, print_rank_0


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add Megatron-LM's flags of conversion."""
    group = parser.add_argument_group("conversion")
    add_model_path(group)
    group.add_argument(
        "--extra-model-path",
        metavar="DIR",
        help="folder of trained draft heads (EAGLE-3 or Medusa, as vLLM and SGLang read them) that "
        "are added to the model; their config.json gives their sizes",
    )


def add_heads(args: argparse.Namespace) -> None:
    """Write the checkpoint of the heads of --extra-model-path on the model of --load."""
    folder = Path(local_folder(args.extra_model_path, "--extra-model-path"))
    if not draft_heads.is_folder_of_heads(folder):
        raise ConfigError(
            f"--extra-model-path {folder}: it holds no draft heads, with a config.json of EAGLE-3 "
            "or Medusa; new heads start by --export-num-medusa-heads or --export-num-eagle-layers"
        )
    convert(
        ConversionRequest(
            source=folder,
            base=Path(args.load),
            target=Path(args.save),
            format="safetensors_dist",
        )
    )


def main() -> None:
    """Load the model and save it."""
    args = parse(add_flags)
    if args.save is None:
        raise ConfigError("--save is missing: give the folder of the checkpoint to write")
    if args.extra_model_path is not None:
        if is_rank0():
            add_heads(args)
        return
    model = load_model(args)
    save_checkpoint(1, model, None, None, 0)
    if is_rank0() and hf_folder.has_tokenizer(Path(args.load)):
        beside = Path(args.save, BESIDE)  # config.json and tokenizer, for exports
        beside.mkdir(exist_ok=True)
        hf_folder.copy_beside(Path(args.load), beside)
    print_rank_0(f"wrote the checkpoint {args.save}")


if __name__ == "__main__":
    run(main)

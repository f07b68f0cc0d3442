"""Write a checkpoint as a Hugging Face folder; a quantized one keeps its codes and scales.

Its files are ModelOpt's (hf_quant_config.json) where ModelOpt has a form for the recipe, else those
of compressed-tensors.

    python examples/post_training/modelopt/export.py --load QUANTIZED --export-dir FOLDER

Rank 0 reads one tensor at a time, whatever the layout of the checkpoint was.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # installed or not

from examples.post_training.modelopt.common import parse, run
from megatron.core.config.errors import ConfigError
from megatron.core.quantization.formats import RECIPES
from megatron.training.checkpointing.model_folder_args import local_folder
from megatron.training.checkpointing.paths import open_checkpoint
from megatron.training.conversion.convert import DTYPES, HF, ConversionRequest, convert
from megatron.training.conversion.quantized_export import COMPRESSED_TENSORS, MODELOPT
from megatron.training.process.rank_print import is_rank0, print_rank_0

MODELOPT_RECIPES = (
    *("fp8", "fp8_real_quant", "fp8_dynamic", "nvfp4"),
    *("fp8_blockwise", "fp8_blockwise_real_quant"),
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add Megatron-LM's flags of exports."""
    group = parser.add_argument_group("export")
    group.add_argument("--export-dir", help="folder to write")
    group.add_argument(
        "--pretrained-model-name",
        help="Hugging Face folder, or name on the hub, whose config.json and tokenizer are copied; "
        "default: those that lie beside the checkpoint",
    )
    group.add_argument(
        "--export-extra-modules",
        action="store_true",
        help="without effect: draft heads are always written with their model",
    )


def main() -> None:
    """Export."""
    args = parse(add_flags)
    if args.export_dir is None:
        raise ConfigError("--export-dir is missing: give the folder to write")
    if not is_rank0():
        return
    if args.export_extra_modules:
        print_rank_0(
            "WARNING: --export-extra-modules is without effect: draft heads are always written "
            "with their model"
        )
    recipe = open_checkpoint(Path(args.load), args.ckpt_step).asked.get("export_quant_cfg")
    form = MODELOPT if recipe in MODELOPT_RECIPES else COMPRESSED_TENSORS
    if recipe in RECIPES:
        print_rank_0(f"the quantized layers ({recipe}) are written in the form of {form}")
    name = args.pretrained_model_name
    dtype = "bfloat16" if args.bf16 else "float16" if args.fp16 else None
    convert(
        ConversionRequest(
            source=Path(args.load),
            target=Path(args.export_dir),
            format=HF,
            quant_form=form,
            step=args.ckpt_step,
            dtype=None if dtype is None else DTYPES[dtype],
            beside=None if name is None else Path(local_folder(name, "--pretrained-model-name")),
        )
    )


if __name__ == "__main__":
    run(main)

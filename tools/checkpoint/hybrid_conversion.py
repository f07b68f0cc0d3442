"""Write a hybrid (Mamba) checkpoint as one file per rank, in another layout.

    python tools/checkpoint/hybrid_conversion.py --load-dir DIR --save-dir DIR \\
        --target-tp-size 2 --target-pp-size 2

Runs of this project do not need it: their checkpoints load in any layout.  Reads any format and
preserves the optimizer state.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # installed or not

from megatron.core.config.errors import ConfigError
from megatron.training.conversion.convert import ConversionRequest, convert
from megatron.training.preprocess.cli import run_tool

# Sizes that Megatron-LM's script takes as flags; the checkpoint has them.
_SIZES = ("--d-model", "--mamba-d-state", "--mamba2-n-groups", "--mamba2-head-dim")


def get_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--load-dir", type=Path, required=True)
    add("--save-dir", type=Path, required=True)
    add("--target-tp-size", type=int, default=1)
    add("--target-pp-size", type=int, default=1)
    add("--reset-iterations", action="store_true", help="weights alone, for a run from its start")
    add("--mamba-version", type=int, default=2, help="2")
    for flag in _SIZES:
        add(flag, type=int, help="without effect: the checkpoint says it")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    args = get_parser().parse_args(argv)
    if args.mamba_version != 2:
        raise ConfigError(f"--mamba-version {args.mamba_version}: mixers here are of Mamba-2")
    for flag in _SIZES:
        if getattr(args, flag[2:].replace("-", "_")) is not None:
            print(f"note: {flag} is without effect: the checkpoint says it")
    layout = {
        "tensor_model_parallel_size": args.target_tp_size,
        "pipeline_model_parallel_size": args.target_pp_size,
    }
    wanted = ConversionRequest(
        source=args.load_dir,
        target=args.save_dir,
        format="torch",
        args=layout,
        kind="mamba",
        is_release=args.reset_iterations,
    )
    convert(wanted)


if __name__ == "__main__":
    sys.exit(run_tool(main))

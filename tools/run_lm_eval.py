"""Run lm-eval (EleutherAI's evaluation harness) on a checkpoint, without exporting it.

    python tools/run_lm_eval.py --model megatron --model_args load=DIR --tasks hellaswag
    torchrun --nproc-per-node 2 tools/run_lm_eval.py --model megatron \
        --model_args load=DIR,tensor_model_parallel_size=2 --tasks hellaswag

The arguments are those of the command lm_eval (pip install "lm-eval[api]").  Model arguments: load,
ckpt_step, max_length, max_requests, max_gen_toks, tensor_model_parallel_size,
pipeline_model_parallel_size and expert_model_parallel_size.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.config.errors import MegatronError
from megatron.core.optional import available, require
from megatron.inference.lm_eval_adapter import follow, register
from megatron.training.process.exit_report import exit_code

_WANTED_BY = "tools/run_lm_eval.py"


def model_args(argv: list[str]) -> dict[str, Any]:
    """Return the model arguments of a command line of lm_eval."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--model_args", "-a", nargs="*", default=[])
    parser.add_argument("--device")
    found, _ = parser.parse_known_args(argv)
    parse = require("lm_eval.utils", _WANTED_BY).simple_parse_args_string
    return {**parse(",".join(found.model_args)), "device": found.device}


def main() -> None:
    """Run lm_eval on rank 0; the other ranks compute with it."""
    if {"-h", "--help"} & {*sys.argv[1:]}:
        print(__doc__)
        if not available("lm_eval"):
            return None
    try:
        if int(os.environ.get("RANK", "0")):
            return follow(model_args(sys.argv[1:]))
        opened = register()
        command = require("lm_eval.__main__", _WANTED_BY)
        try:
            command.cli_evaluate()
        finally:
            for writer in opened:
                writer.engine.close()
    except MegatronError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(exit_code(error))


if __name__ == "__main__":
    main()

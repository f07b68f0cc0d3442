"""Plan a run without running it: print what `pretrain_gpt.py --check-only` prints.

python tools/plan.py --check-world-size 1024 --check-device-memory-gib 80 --num-layers 96 ...
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # installed or not

import megatron.post_training  # noqa: F401  registers its objectives
from megatron.core.config.errors import ConfigError
from megatron.training.arguments.parser import parse_args
from megatron.training.planning.check import check_only


def main() -> None:
    """Check the flags; exit with status 0 if the run can start, else 2."""
    try:
        args = parse_args(args_defaults={"tokenizer_type": "GPT2BPETokenizer"})
    except ConfigError as error:  # of the file of --config
        print(f"ConfigError: {error}", file=sys.stderr)
        sys.exit(2)
    args.check_only = True
    sys.exit(check_only(args))


if __name__ == "__main__":
    main()

"""Prune a GPT to smaller sizes, by the importance of its parts on calibration samples (Minitron).

    python tools/prune.py --load DIR --save DIR --data-path PREFIX --calib-size 1024 \
        --target-num-layers 24 --target-ffn-hidden-size 9216
    torchrun --nproc-per-node 8 tools/prune.py --tensor-model-parallel-size 8 ...

The flags are those of pretrain_gpt.py; the model is that of the checkpoint.  --save receives a
checkpoint in safetensors_dist, which loads with --use-checkpoint-args and can be distilled from the
complete model (--export-kd-teacher-load) or converted to Hugging Face.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.config.errors import MegatronError
from megatron.post_training.pruning.pruning import add_flags, prune_checkpoint
from megatron.training.initialize import configure, connect, fail, fail_before_start, shut_down

DEFAULTS = {"model_kind": "gpt", "tokenizer_type": "GPT2BPETokenizer"}
OWN = ("--use-checkpoint-args", "--finetune", "--skip-train", "--no-load-optim", "--no-load-rng")


def main() -> None:
    """Entry point."""
    sys.argv[1:1] = OWN

    def provider(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        return add_flags(parser)

    try:
        config = configure(provider, DEFAULTS)
    except MegatronError as error:
        fail_before_start(error)
        raise SystemExit(error.exit_code) from None
    try:
        connect(config)
        prune_checkpoint(config)
    except MegatronError as error:
        fail(error)
        raise SystemExit(error.exit_code) from None
    finally:
        shut_down()


if __name__ == "__main__":
    main()

"""Prune a Hugging Face folder or a checkpoint by importance, as tools/prune.py does.

    python examples/post_training/modelopt/prune.py --pretrained-model-path HF_FOLDER \\
        --save CHECKPOINT --data-path corpus_text_document --target-num-layers 24

--prune-export-config, of later Megatron-LM versions, gives the sizes as JSON: {"num_layers": 24}.
Their --skip-generate is always so: this program generates nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # installed or not

from examples.post_training.modelopt.common import run
from megatron.core.config.errors import ConfigError
from tools import prune


def command_line(words: list[str]) -> list[str]:
    """Return the command line of tools/prune.py.  Raises ConfigError."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--pretrained-model-path")
    parser.add_argument("--prune-export-config")
    parser.add_argument("--skip-generate", action="store_true")
    own, rest = parser.parse_known_args(words)
    if own.pretrained_model_path is not None:
        rest += ["--load", own.pretrained_model_path]
    if own.prune_export_config is not None:
        try:
            sizes = dict(json.loads(own.prune_export_config))
        except (ValueError, TypeError):
            raise ConfigError(
                f"--prune-export-config {own.prune_export_config}: give a JSON object of sizes, "
                'such as {"num_layers": 24}'
            ) from None
        rest += [
            w for name, n in sizes.items() for w in (f"--target-{name.replace('_', '-')}", str(n))
        ]
    return rest


def main() -> None:
    """Prune."""
    sys.argv[1:] = ["--micro-batch-size", "1", *command_line(sys.argv[1:])]
    prune.main()


if __name__ == "__main__":
    run(main)

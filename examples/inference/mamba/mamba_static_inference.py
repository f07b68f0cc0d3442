"""Generate text with a Mamba model or a hybrid, with Megatron Core's static engine.

    python examples/inference/mamba/mamba_static_inference.py --load checkpoints \\
        --use-checkpoint-args --prompts "def main(" --num-tokens-to-generate 32
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # installed or not

from examples.inference.gpt.gpt_static_inference import main

if __name__ == "__main__":
    main("mamba")

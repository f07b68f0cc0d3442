"""Generate with several replicas of a model: rank 0 gives each prompt to the one with least work.

    torchrun --nproc-per-node 4 \\
        examples/inference/advanced/gpt_dynamic_inference_with_coordinator.py \\
        --tensor-model-parallel-size 2 --load checkpoints --prompts "def main(" "import"
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # installed or not

from examples.inference.offline_inference import main

if __name__ == "__main__":
    main()

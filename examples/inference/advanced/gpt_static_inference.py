"""The path of gpt/gpt_static_inference.py in later Megatron-LM versions; also writes the speed."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # installed or not

from examples.inference.gpt.gpt_static_inference import main

if __name__ == "__main__":
    main(records_throughput=True)

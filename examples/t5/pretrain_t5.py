"""The path of pretrain_t5.py in later Megatron-LM versions."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))  # installed or not
    runpy.run_path(str(ROOT / "pretrain_t5.py"), run_name="__main__")

"""The name of pretrain_mamba.py in later Megatron-LM versions."""

from __future__ import annotations

import runpy
from pathlib import Path

if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).with_name("pretrain_mamba.py")), run_name="__main__")

"""Start examples/post_training/modelopt/calibrate_gpt.py, at the place of Megatron-LM's program.

python tasks/quantize/calibrate_gpt.py --task WIKITEXT103 --load CHECKPOINT --valid-data FILE
"""

from __future__ import annotations

import runpy
from pathlib import Path

PROGRAM = Path(__file__).resolve().parents[2] / "examples/post_training/modelopt/calibrate_gpt.py"

if __name__ == "__main__":
    runpy.run_path(str(PROGRAM), run_name="__main__")

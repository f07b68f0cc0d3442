"""The server under the name that Megatron-LM has for Mamba; the checkpoint decides the model."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.run_text_generation_server import main

if __name__ == "__main__":
    main()

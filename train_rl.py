"""The name of pretrain_rl.py in later Megatron-LM versions."""

from __future__ import annotations

from megatron.training.process import early_sigterm  # before the imports that take seconds

if __name__ == "__main__":
    early_sigterm.begin_imports()

# isort: split
from pretrain_rl import main

if __name__ == "__main__":
    early_sigterm.end_imports()
    main()

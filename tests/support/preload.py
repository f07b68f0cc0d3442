"""What the fork servers import and compute before they fork the first process.

Nothing here may run a torch operation: its thread pools do not survive a fork.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import pkgutil
import sys
from pathlib import Path

from tests.support import host_gpu

ROOT = Path(__file__).resolve().parents[2]


def preload_package(name: str) -> None:
    """Import every module of package ``name`` that can be imported.

    A module that cannot is passed over: the test that needs it reports the error better.
    """
    with contextlib.suppress(Exception):
        package = importlib.import_module(name)
        for info in pkgutil.iter_modules(package.__path__, f"{name}."):
            if info.ispkg:
                preload_package(info.name)
            else:
                with contextlib.suppress(Exception):
                    importlib.import_module(info.name)


if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))
host_gpu.load()
# The last is imported by fully_shard, and by many models of transformers.
for module in ("numpy.random", "pytest", "torch", "torch.distributed", "torch._dynamo"):
    importlib.import_module(module)
# Of optional packages, what programs with a tokenizer or a model of Hugging Face, or with
# TensorBoard, import.
OPTIONAL = (
    "transformers.models.auto.tokenization_auto",
    "transformers.modeling_utils",
    "torch.utils.tensorboard",
)
for module in OPTIONAL:
    with contextlib.suppress(Exception):
        importlib.import_module(module)
for module in ("tests.support.ranks", "tests.support.tolerances"):
    importlib.import_module(module)
preload_package("megatron")
# Fills its caches.
importlib.import_module("megatron.training.arguments.parser").parse_args(argv=[])
gc.freeze()  # ranks share these pages with the server until they write to them

"""What the runner supplies so that a project imports and runs here: a GPU, a package, names.

A supplied name stands for a feature that the checks do not use; who uses it gets an error.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

from tools.dev.lib import emulated_cuda, emulated_transformer_engine

# They import it without asking whether it is there.
NEED_TRANSFORMER_ENGINE = ("megatron.bridge", "mcore_bridge", "swift")

# Package -> "module:name" that its modules import at once: of ModelOpt and of releases after v0.14.
NAMES = {
    "megatron.bridge": (
        "megatron.core.post_training.modelopt.gpt.model_specs:get_gpt_modelopt_spec",
        "megatron.core.post_training.modelopt.mamba.model_specs:get_mamba_stack_modelopt_spec",
        "megatron.core.models.gpt.experimental_attention_variant_module_specs:"
        "get_transformer_block_with_experimental_attention_variant_spec",
        "megatron.core.transformer.enums:CudaGraphScope",
        "megatron.core.tokenizers:MegatronTokenizer",
    )
}


class Supplied:
    """Stands for a class or a function."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        raise NotImplementedError("supplied by the runner for an import only")


def prepare(package: str) -> None:
    """Supply what a package needs and this machine lacks."""
    emulated_cuda.emulate()
    if package in NEED_TRANSFORMER_ENGINE:
        emulated_transformer_engine.install()
    for place in NAMES.get(package, ()):
        path, _, name = place.partition(":")
        module = _module(path)
        if not hasattr(module, name):
            setattr(module, name, type(name, (Supplied,), {}))
            print(f"imports:   supplied: {place}")


def _module(path: str) -> ModuleType:
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        parent, _, name = path.rpartition(".")
        module = ModuleType(path)
        module.__path__ = []
        setattr(_module(parent), name, module)
        sys.modules[path] = module
        return module

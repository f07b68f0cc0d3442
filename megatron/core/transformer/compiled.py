"""Compilation of transformer layers by torch.compile (--compile).

The methods of module instances are replaced, so parameter names, hooks and checkpoints do not
change.  The first forward pass compiles.  Linear layers with tensor-parallel collectives run
uncompiled, as graph breaks between compiled regions.  Shapes are static: a batch of another shape
(such as a shorter prompt) is compiled anew.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
import warnings
from pathlib import Path

import torch
from torch import nn

from megatron.core import device
from megatron.core.config.errors import MissingDependency
from megatron.core.diagnostics.log_once import warn_once
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.transformer_block import TransformerBlock

# Before torch 2.13, a compiled autograd function that writes in place in forward gave zeros, and no
# error, in place of gradients.
_KEEPS_GRADIENTS = not torch.__version__.startswith(("2.11", "2.12"))


def compile_layers(model: nn.Module, regions: str) -> None:
    """Compile the transformer layers of ``model`` according to --compile.

    ``regions``: each layer on its own ("layer"), all layers of a stage at once ("model"), or no
    layer ("none").  Raises MissingDependency on a CPU without a C++ compiler.  Compiles nothing,
    with a warning, if this torch would lose gradients.
    """
    if regions == "none":
        return
    if not device.is_cuda():
        _require_compiler(regions)
    if not _KEEPS_GRADIENTS:
        warn_once(
            f"--compile {regions} is without effect: torch {torch.__version__} compiles custom "
            "autograd functions to gradients of zero; use torch 2.13"
        )
        return
    if not device.is_cuda():
        warn_once(
            f"--compile {regions} makes training on a CPU slower: --compile layer by 1 to 7 % "
            "where it was measured (benchmarks/train_cpu.md); use --compile none, the default"
        )
    # Dynamo warns that it traces through the lru_cache of masks; recomputing them is cheap.
    warnings.filterwarnings("ignore", "Dynamo detected a call to a `functools.lru_cache`")
    for module in list(model.modules()):
        if isinstance(module, (ColumnParallelLinear, RowParallelLinear)):
            if module.tp_group.size() > 1:
                vars(module)["forward"] = torch.compiler.disable(module.forward)
        elif isinstance(module, TransformerBlock) and regions == "model":
            vars(module)["_run"] = torch.compile(module._run, dynamic=False)
        elif isinstance(module, TransformerBlock):
            for layer in module.layers:
                vars(layer)["forward"] = torch.compile(layer.forward, dynamic=False)


def _require_compiler(regions: str) -> None:
    compiler = os.environ.get("CXX", "g++")
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    missing = [] if shutil.which(compiler) else [f"the compiler {compiler}"]
    missing += [] if header.exists() else [f"Python's header {header}"]
    if missing:
        raise MissingDependency(
            f"--compile {regions}: {' and '.join(missing)} is missing; install g++ and the "
            "headers of Python, or set CXX to another compiler"
        )

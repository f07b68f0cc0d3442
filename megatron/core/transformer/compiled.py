"""Layers compiled by PyTorch (--compile).

Methods are replaced on the instances: names of parameters, hooks and what a checkpoint holds stay
as they are.  The compiler is started by the first pass.  Products of a tensor-parallel group, with
the collectives inside them, are called as they are, between compiled stretches.  A run's batches
are all of one size; another size (a shorter prompt) is compiled anew.
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
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.transformer_block import TransformerBlock


def compile_layers(model: nn.Module, regions: str) -> None:
    """Compile each "layer" of ``model``, or all of a stage as one ("model"); "none": nothing.

    Raises MissingDependency where a CPU has no compiler.
    """
    if regions == "none":
        return
    if not device.is_cuda():
        _require_compiler(regions)
    # It says of small tables that it computes them again.
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

"""The compiled parts.  All else is in pyproject.toml.

Both are optional: without a compiler the install succeeds, numpy builds the index arrays of
datasets, and torch computes on a CPU what fused kernels do, more slowly.  All cores compile;
MAX_JOBS limits them.  Without debug information, a fifth of the time.
"""

import contextlib
import os
import shutil
import sys
import time
from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.errors import BaseError, CCompilerError, CompileError

_SETS = ("plain", "avx2", "avx512", "avx512_bf16")  # of instructions, a file each
_KERNELS = (
    "call",
    "kernels",
    "vector",
    "elementwise",
    "rows",
    "adam",
    "small_linear",
    "quantized_rows",
    "paged_attention",
)
# Wide vectors never cross a call; gcc's own headers start from an undefined one.
_QUIET = ["-Wno-psabi", "-Wno-maybe-uninitialized", "-Wno-uninitialized"]
_THREADS = ["-fopenmp"] if sys.platform.startswith("linux") else []


def _say(text: str) -> None:
    """Print to the output of the build, and to the terminal from which pip hides that output."""
    line = f"megatron-train: {text}"
    print(line, flush=True)
    if not sys.stdout.isatty():
        with contextlib.suppress(OSError), open("/dev/tty", "w") as terminal:
            print(f"\r{line}", file=terminal, flush=True)  # over the spinner of pip


class _Build(build_ext):
    def build_extension(self, ext: Extension) -> None:
        jobs = min(len(ext.sources), int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1))
        began_s = time.monotonic()
        _say(f"compiling {ext.name}, {len(ext.sources)} files, {jobs} at a time ...")
        try:
            super().build_extension(ext)
        except (
            BaseError,
            CCompilerError,
            CompileError,
        ):  # the install goes on: extensions are optional
            _say(f"{ext.name} was not compiled: what it computes will be slower")
            raise
        _say(f"compiled {ext.name} in {time.monotonic() - began_s:.0f} s")


class _Programs(build_py):
    """Also puts the programs of the checkout into the wheel, for `megatron_commands`."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:  # they are found in the checkout
            return
        target = Path(self.build_lib, "megatron", "programs")
        tools = [p for p in Path("tools").rglob("*.py") if "dev" not in p.parts]
        recipes = [p for n in ("*.*", "data/*.*") for p in Path("examples/recipes").glob(n)]
        for source in [*Path().glob("pretrain_*.py"), Path("train_rl.py"), *tools, *recipes]:
            (target / source).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target / source)


ParallelCompile("MAX_JOBS").install()
setup(
    cmdclass={"build_ext": _Build, "build_py": _Programs},
    ext_modules=[
        Pybind11Extension(
            "megatron.core.datasets.helpers_cpp",
            ["megatron/core/datasets/helpers.cpp"],
            cxx_std=17,
            # Products must not be fused with what follows, or blends differ between processors.
            extra_compile_args=["-O3", "-g0", "-ffp-contract=off"],
            optional=True,
        ),
        Pybind11Extension(
            "megatron.core.kernels_cpp",
            [
                "megatron/core/fusions/cpu/kernels.cpp",
                *(f"megatron/core/fusions/cpu/kernels_{name}.cpp" for name in _SETS),
            ],
            depends=[f"megatron/core/fusions/cpu/{name}.h" for name in _KERNELS],
            cxx_std=17,
            extra_compile_args=["-O3", "-g0", "-fno-math-errno", *_QUIET, *_THREADS],
            extra_link_args=_THREADS,
            optional=True,
        ),
    ],
)

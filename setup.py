"""The compiled parts.  All else is in pyproject.toml.

Both are optional: without a compiler the install succeeds, numpy builds the index arrays of
datasets, and torch computes on a CPU what fused kernels do, more slowly.
"""

import sys

from pybind11.setup_helpers import Pybind11Extension
from setuptools import setup

_KERNELS = (
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

setup(
    ext_modules=[
        Pybind11Extension(
            "megatron.core.datasets.helpers_cpp",
            ["megatron/core/datasets/helpers.cpp"],
            cxx_std=17,
            # Products must not be fused with what follows, or blends differ between processors.
            extra_compile_args=["-O3", "-ffp-contract=off"],
            optional=True,
        ),
        Pybind11Extension(
            "megatron.core.kernels_cpp",
            ["megatron/core/fusions/cpu/kernels.cpp"],
            depends=[f"megatron/core/fusions/cpu/{name}.h" for name in _KERNELS],
            cxx_std=17,
            extra_compile_args=["-O3", "-fno-math-errno", *_QUIET, *_THREADS],
            extra_link_args=_THREADS,
            optional=True,
        ),
    ]
)

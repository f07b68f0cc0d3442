"""The one compiled part: index builders of the datasets.  All else is in pyproject.toml.

The extension is optional: without a compiler the install succeeds, and the numpy path builds
the same arrays, more slowly.
"""

from pybind11.setup_helpers import Pybind11Extension
from setuptools import setup

setup(
    ext_modules=[
        Pybind11Extension(
            "megatron.core.datasets.helpers_cpp",
            ["megatron/core/datasets/helpers.cpp"],
            cxx_std=17,
            # Products must not be fused with what follows, or blends differ between processors.
            extra_compile_args=["-O3", "-ffp-contract=off"],
            optional=True,
        )
    ]
)

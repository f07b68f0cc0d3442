"""Megatron Core's helpers around configs: experimental code, storage, graphs.

What a helper of Megatron Core switches on, this project does always or never; the helper says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, TypeVar

from torch import nn

from megatron.core.optional import available, require

T = TypeVar("T", bound=Callable[..., Any])
__version__ = "0.14.0"  # Megatron Core's release whose API this project has

# -- experimental code: a project marks its own functions and classes ------------------------------

_flags = {"experimental": False}


class ExperimentalNotEnabledError(Exception):
    """Experimental code is used, and `set_experimental_flag` has not allowed it."""


def set_experimental_flag(flag: bool) -> None:
    """Allow, or forbid, functions and classes that are marked as experimental."""
    _flags["experimental"] = flag


def is_experimental_enabled() -> bool:
    """Return whether experimental code may run."""
    return _flags["experimental"]


def experimental_fn(introduced_with_version: str) -> Callable[[T], T]:
    """Return a decorator of a function that raises ExperimentalNotEnabledError unless allowed."""
    del introduced_with_version

    def decorate(function: T) -> T:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not is_experimental_enabled():
                raise ExperimentalNotEnabledError(
                    f"{function.__name__} is experimental: call set_experimental_flag(True) first"
                )
            return function(*args, **kwargs)

        return call  # type: ignore[return-value]

    return decorate


def experimental_cls(introduced_with_version: str) -> Callable[[type], type]:
    """Return a decorator of a class whose construction raises unless experimental code may run."""

    def decorate(cls: type) -> type:
        cls.__init__ = experimental_fn(introduced_with_version)(cls.__init__)  # type: ignore[misc]
        return cls

    return decorate


# -- low precision: layers quantize by their config, without a context around them -----------------

HAVE_TE_FP8_TENSOR_CLASS = False
FP8_TENSOR_CLASS = None


def get_fp8_context(
    config: object, layer_no: int = -1, is_init: bool = False
) -> AbstractContextManager[None]:
    """Return a context without effect: each layer quantizes as its config says."""
    del config, layer_no, is_init
    return nullcontext()


get_fp4_context = get_fp8_context


def correct_amax_history_if_needed(model: Sequence[nn.Module]) -> None:
    """Do nothing: scales of this project are right after a load."""


# -- compiled functions and graphs -----------------------------------------------------------------


def jit_fuser(function: T) -> T:
    """Return ``function`` unchanged: compiling small functions took longer than it saved."""
    return function


def disable_jit_fuser() -> None:
    """Do nothing: `jit_fuser` compiles nothing."""


class FullCudaGraphWrapper:
    """Schedule that Megatron Core captures as one graph; this project runs it without capture.

    The configuration's ``enable_cuda_graph`` captures layers; ``cuda_graph_scope``
    ``full_iteration`` needs this project's training loop.
    """

    curr_iteration = {"training": 0, "validation": 0}
    cuda_graph: dict[str, Any] = {"training": None, "validation": None}
    result: dict[str, Any] = {"training": None, "validation": None}

    def __init__(
        self, forward_backward_func: Callable[..., Any], cuda_graph_warmup_steps: int = 1
    ) -> None:
        self.forward_backward_func = forward_backward_func
        self.cuda_graph_warmup_steps = cuda_graph_warmup_steps

    def __call__(self, **kwargs: Any) -> Any:
        stage = "validation" if kwargs["forward_only"] else "training"
        self.result[stage] = self.forward_backward_func(**kwargs)
        self.next_iter(stage)
        return self.result[stage]

    def curr_iter(self, stage: str) -> int:
        """Return the number of calls for ``stage``, training or validation."""
        return self.curr_iteration[stage]

    def next_iter(self, stage: str) -> None:
        """Count a call."""
        self.curr_iteration[stage] += 1


# -- storage ---------------------------------------------------------------------------------------


class _StorageClient:
    """Switch of the Multi-Storage Client, a package that opens files in object storage."""

    def __init__(self) -> None:
        self._is_on = True

    def enable(self) -> None:
        """Use the package if it is installed, which is the default."""
        self._is_on = True

    def disable(self) -> None:
        """Do not use the package."""
        self._is_on = False

    def is_enabled(self) -> bool:
        """Return whether the package is used."""
        return self._is_on and available("multistorageclient")

    def import_package(self) -> Any:
        """Return the package.  Raises RuntimeError if it is switched off."""
        if not self._is_on:
            raise RuntimeError("the Multi-Storage Client is disabled: call enable() first")
        return require("multistorageclient", "MultiStorageClientFeature")


MultiStorageClientFeature = _StorageClient()


def open_file(*args: Any, **kwargs: Any) -> Any:
    """Open a file, in object storage too if the Multi-Storage Client is used."""
    if MultiStorageClientFeature.is_enabled():
        return MultiStorageClientFeature.import_package().open(*args, **kwargs)
    return open(*args, **kwargs)

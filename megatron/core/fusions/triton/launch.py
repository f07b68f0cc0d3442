"""Launch kernels of Triton with little time of the host.

Triton examines every argument of every launch, which takes 10 to 20 microseconds: the eight
launches of a Llama layer took a third of the host's time.  `launch` keeps the compiled kernel for
arguments that it has seen, as tests.support.host_gpu.host_time shows.  Triton does not document the
launch of a compiled kernel: where it fails, Triton launches the kernel as usual.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import triton
from torch import Tensor

from megatron.core.diagnostics.log_once import warn_once
from megatron.core.rank_local import each_rank_owns

# Releases whose source has been compared with `_launch_directly`.  Another one might read other
# arguments: 3.9 reads as many as the kernel has parameters, without counting those it is given.
_COMPARED = ("3.6", "3.7", "3.8", "3.9")
_MOST_KEPT = 4096  # sequences of many lengths have a kernel each
_compiled: dict[object, Any] = {}
each_rank_owns(__name__, "_compiled")


def launch(
    kernel: triton.JITFunction,
    grid: tuple[int, ...],
    tensors: tuple[Tensor | None, ...],
    numbers: tuple[object, ...],
    num_warps: int,
) -> None:
    """Run ``kernel[grid](*tensors, *numbers, num_warps=num_warps)``, a global of its module.

    One argument for each parameter, constants too, in their order; the first is a tensor.  Triton
    compiles for dtypes, addresses in multiples of 16, None and some values of integers.
    """
    assert tensors[0] is not None, "a tensor says which device it is"
    where = tensors[0].get_device()
    kinds = [t if t is None else (t.dtype, t.data_ptr() % 16) for t in tensors]
    key = id(kernel), where, num_warps, numbers, *kinds
    compiled = _compiled.get(key)
    if compiled is not None:
        try:
            _launch_directly(compiled, where, (*grid, 1, 1), tensors + numbers)
            return
        except (AttributeError, TypeError) as error:
            _warn(f"refuses a direct launch ({type(error).__name__}: {error})")
            _compiled[key] = None
    result = kernel[grid](*tensors, *numbers, num_warps=num_warps)
    if key not in _compiled:
        # Triton adds defaults, a direct launch does not.
        given = len(tensors) + len(numbers)
        assert given == len(kernel.arg_names), f"{kernel}: {given} of {kernel.arg_names}"
        if len(_compiled) == _MOST_KEPT:
            _compiled.clear()
        # None in the interpreter, which compiles nothing.
        _compiled[key] = result if _is_compared(triton.__version__) else None


def _launch_directly(
    compiled: Any, where: int, grid: tuple[int, ...], arguments: tuple[Any, ...]
) -> None:
    """Do what Triton 3.6 to 3.9 do once they have found the compiled kernel.

    ``compiled[grid](*arguments)`` does the same, but creates and passes an object for hooks, of
    which only profilers have any, and asks twice which device is the current one.
    """
    hooks = triton.knobs.runtime
    if hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:
        compiled[grid[:3]](*arguments)
        return
    stream = triton.runtime.driver.active.get_current_stream(where)
    function = compiled.function
    metadata = compiled.packed_metadata
    x, y, z, *_ = grid
    compiled.run(x, y, z, stream, function, metadata, None, None, None, *arguments)


@cache
def _is_compared(release: str) -> bool:
    is_compared = ".".join(release.split(".")[:2]) in _COMPARED
    if not is_compared:
        _warn(f"({release}) is none of {', '.join(_COMPARED)}, whose launchers are known")
    return is_compared


def _warn(why: str) -> None:
    warn_once(
        "Triton's own launcher, which takes longer on the host, launches a kernel: this release of "
        f"Triton {why}"
    )


def power_of_2(size: int) -> int:
    """Return the smallest power of 2 that is at least ``size``; triton's own takes longer."""
    return 1 << (size - 1).bit_length()

"""The order in which a GPU starts kernels of different streams."""

from __future__ import annotations

from collections.abc import Mapping

from megatron.core import device

_BLACKWELL = (10, 0)  # compute capability


def is_kept(environ: Mapping[str, str]) -> bool:
    """Return whether kernels of different streams start in the order of their launch.

    They do with CUDA_DEVICE_MAX_CONNECTIONS=1, on GPUs before Blackwell.
    """
    is_one_queue = environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"
    return is_one_queue and device.capability(device.current()) < _BLACKWELL

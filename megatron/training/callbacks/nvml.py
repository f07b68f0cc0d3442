"""Read NVML counters of this rank's GPU.

A failure never ends a run, and never makes a rank skip a collective.
"""

from __future__ import annotations

import math
from typing import Any

from megatron.training.runtime.sink_failure import warn_switched_off


class Gpu:
    """A GPU in NVML.  After the first failure of the driver every reading is NaN."""

    def __init__(self, nvml: Any, uuid: str, flag: str) -> None:
        self._nvml, self._flag = nvml, flag
        self._has_failed = False
        self._handle: Any = None
        self._call(nvml.nvmlInit)
        self._handle = self._call(nvml.nvmlDeviceGetHandleByUUID, uuid)

    def read(self, quantity: str, *args: Any) -> Any:
        """Return the result of ``nvmlDeviceGet<quantity>``, or NaN if the driver fails."""
        return self._call(getattr(self._nvml, f"nvmlDeviceGet{quantity}"), self._handle, *args)

    def close(self) -> None:
        """Shut NVML down."""
        self._call(self._nvml.nvmlShutdown)

    def _call(self, function: Any, *args: Any) -> Any:
        if self._has_failed:
            return math.nan
        try:
            return function(*args)
        except self._nvml.NVMLError as error:
            self._has_failed = True
            warn_switched_off(f"reading the GPU's counters ({self._flag})", error)
            return math.nan

"""Counters of this rank's GPU in NVML, and the energy that all GPUs of the run use.

A failure never ends a run, and never makes a rank skip a collective.
"""

from __future__ import annotations

import math
from typing import Any

from megatron.core import device
from megatron.core.diagnostics.log_once import warn_switched_off
from megatron.core.optional import available, require
from megatron.core.parallel.collectives import values_of_ranks


class EnergyMonitor:
    """Energy that the GPUs of all ranks use, except while paused; 0 without NVML.

    `lap` and `get_total` are collective over all ranks, and NaN if the counter of any rank cannot
    be read.  NVML's counter is in mJ.
    """

    def __init__(self) -> None:
        self._gpu: Gpu | None = None
        self._used_mj = self._total_mj = 0.0
        self._since_mj: float | None = None  # the counter when measuring began; None while paused

    def setup(self) -> None:
        """Connect to NVML."""
        if device.is_cuda() and available("pynvml"):
            self._gpu = Gpu(require("pynvml", "--log-energy"), device.uuid(), "--log-energy")

    def shutdown(self) -> None:
        """Disconnect from NVML."""
        if self._gpu is not None:
            self._gpu.close()

    def pause(self) -> None:
        """Stop counting until `resume`."""
        if self._since_mj is not None:
            self._used_mj += self._counter_mj() - self._since_mj
            self._since_mj = None

    def resume(self) -> None:
        """Start, or continue, to count."""
        self._since_mj = self._counter_mj()

    def lap(self) -> float:
        """Return the energy in J of all ranks since the last call, and start again."""
        self.pause()
        used_mj = self._used_mj
        self._used_mj = 0.0
        self._total_mj += used_mj
        self.resume()
        return _joules_of_ranks(used_mj)

    def get_total(self) -> float:
        """Return the energy in J of all ranks in all laps."""
        return _joules_of_ranks(self._total_mj)

    def _counter_mj(self) -> float:
        return 0.0 if self._gpu is None else float(self._gpu.read("TotalEnergyConsumption"))


def _joules_of_ranks(used_mj: float) -> float:
    return sum(mj for (mj,) in values_of_ranks([used_mj])) / 1000.0


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

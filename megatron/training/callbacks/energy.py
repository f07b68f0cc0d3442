"""Counters of this rank's GPU in NVML, and the energy that all GPUs of the run use (--log-energy).

A failure never ends a run, and never makes a rank skip a collective.
"""

from __future__ import annotations

import logging
import math
from typing import Any

from megatron.core import device
from megatron.core.optional import available, require
from megatron.core.parallel.collectives import values_of_ranks
from megatron.training.step.run import warn_switched_off

logger = logging.getLogger(__name__)


def energy_meter() -> EnergyMeter | None:
    """Return the meter of this rank's GPU; without a GPU or NVML warn and return None."""
    if not device.is_cuda():
        logger.warning("--log-energy is without effect: the CPU has no energy counter to read")
        return None
    if not available("pynvml"):
        logger.warning("--log-energy is without effect: pip install nvidia-ml-py")
        return None
    return EnergyMeter(require("pynvml", "--log-energy"), device.uuid())


class EnergyMeter:
    """Sum the energy that one GPU uses, except while paused."""

    def __init__(self, nvml: Any, uuid: str) -> None:
        self._gpu = Gpu(nvml, uuid, "--log-energy")
        self._used_mj = 0.0
        self._since_mj: float | None = None  # the counter when measuring began; None while paused

    def start(self) -> None:
        """Start to measure."""
        self._used_mj = 0.0
        self._since_mj = self._counter_mj()

    def pause(self) -> None:
        """Stop counting until `resume`."""
        if self._since_mj is not None:
            self._used_mj += self._counter_mj() - self._since_mj
            self._since_mj = None

    def resume(self) -> None:
        """Continue to count."""
        self._since_mj = self._counter_mj()

    def lap_joules(self) -> float:
        """Return the energy in J of all ranks since `start` or the last call.

        Collective over all ranks.  NaN if the counter of any rank cannot be read.
        """
        self.pause()
        used_mj = self._used_mj
        self.start()
        return sum(mj for (mj,) in values_of_ranks([used_mj])) / 1000.0

    def close(self) -> None:
        """Release NVML."""
        self._gpu.close()

    def _counter_mj(self) -> float:
        return float(self._gpu.read("TotalEnergyConsumption"))


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

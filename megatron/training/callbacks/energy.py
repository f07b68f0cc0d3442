"""Measure the energy that the run's GPUs use, from NVML counters (--log-energy)."""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist

from megatron.core import device
from megatron.core.optional import available, require
from megatron.training.callbacks.nvml import Gpu

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
        self.resume()
        joules = self._used_mj / 1000.0
        self._used_mj = 0.0
        if dist.is_initialized() and dist.get_world_size() > 1:
            total = torch.tensor([joules], dtype=torch.float64, device=device.current())
            dist.all_reduce(total)
            joules = float(total.item())
        return joules

    def close(self) -> None:
        """Release NVML."""
        self._gpu.close()

    def _counter_mj(self) -> float:
        return float(self._gpu.read("TotalEnergyConsumption"))

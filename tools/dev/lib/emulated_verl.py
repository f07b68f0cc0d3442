"""verl's platform for a machine without a GPU, added as verl lets hardware add itself.

tools/dev/library_projects.py starts verl with VERL_USE_EXTERNAL_MODULES=tools.dev.lib.emulated_verl
and VERL_PLATFORM=emulated.  The engines are those of a GPU.
"""

from __future__ import annotations

import os

from verl.plugin.platform import PlatformRegistry
from verl.plugin.platform.platform_cuda import PlatformCUDA

from tools.dev.lib import emulated_cuda


@PlatformRegistry.register(platform="emulated")
class EmulatedPlatform(PlatformCUDA):
    """verl's CUDA platform, with one device that is the CPU, and gloo."""

    device_name = emulated_cuda.CPU.type

    def is_available(self) -> bool:
        """Return that it is."""
        return True

    def device_count(self) -> int:
        """Return that there is one device for each process."""
        return 1

    def communication_backend_name(self) -> str:
        """Return the backend of processes without GPUs."""
        return "gloo"


os.environ["VERL_ENGINE_DEVICE"] = PlatformCUDA().device_name
emulated_cuda.emulate()

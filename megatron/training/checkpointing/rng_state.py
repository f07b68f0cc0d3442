"""Random states of a rank as JSON: python, numpy, torch, device, named streams."""

from __future__ import annotations

import random

import numpy as np
import torch

from megatron.core import device
from megatron.core.config.value_types import JsonObject
from megatron.core.dist_checkpointing import rng_json
from megatron.core.tensor_parallel.random import get_rng_tracker


def rng_state() -> JsonObject:
    """Return the states of all random generators of this rank."""
    return rng_json.to_json(
        {
            "random_rng_state": random.getstate(),
            "np_rng_state": np.random.get_state(),
            "torch_rng_state": torch.get_rng_state(),
            "cuda_rng_state": device.rng_state() if device.is_cuda() else None,
            "rng_tracker_states": get_rng_tracker().get_states(),
        }
    )


def set_rng_state(values: JsonObject) -> None:
    """Restore the states that `rng_state` returned.

    If they were saved on the other kind of device (CPU, GPU), the device generator and the named
    streams are not changed.
    """
    states = rng_json.from_json(values)
    random.setstate(states["random_rng_state"])
    np.random.set_state(states["np_rng_state"])
    torch.set_rng_state(states["torch_rng_state"])
    has_device_state = states["cuda_rng_state"] is not None
    if has_device_state != device.is_cuda():
        return
    if has_device_state:
        device.set_rng_state(states["cuda_rng_state"])
    get_rng_tracker().set_states(states["rng_tracker_states"])

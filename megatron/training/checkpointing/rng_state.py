"""The random generators of a rank, as JSON: python, numpy, torch, device, named streams."""

from __future__ import annotations

import base64
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron.core import device
from megatron.core.tensor_parallel.random import get_rng_tracker


def rng_state() -> dict[str, Any]:
    """The states of all generators of this rank.

    Names are those of the reference.  Byte tensors are base64.
    """
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "random_rng_state": [version, list(words), gauss],
        "np_rng_state": [kind, [int(key) for key in keys], position, has_gauss, cached],
        "torch_rng_state": _to_text(torch.get_rng_state()),
        "cuda_rng_state": _to_text(device.rng_state()) if device.is_cuda() else None,
        "rng_tracker_states": {
            name: _to_text(state) for name, state in get_rng_tracker().get_states().items()
        },
    }


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Continue where `rng_state` was taken.

    A device generator, and streams, of a run on the other kind of device are left alone.
    """
    version, words, gauss = state["random_rng_state"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, *rest = state["np_rng_state"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(_to_tensor(state["torch_rng_state"]))
    has_device_state = state["cuda_rng_state"] is not None
    if has_device_state != device.is_cuda():
        return
    if has_device_state:
        device.set_rng_state(_to_tensor(state["cuda_rng_state"]))
    streams = {name: _to_tensor(text) for name, text in state["rng_tracker_states"].items()}
    get_rng_tracker().set_states(streams)


def _to_text(state: Tensor) -> str:
    return base64.b64encode(state.cpu().numpy().tobytes()).decode()


def _to_tensor(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)

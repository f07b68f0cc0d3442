"""The states of a rank's random generators, and the same as JSON: byte tensors are base64.

Names and forms of the states are those of Megatron-LM: of python, numpy, torch, the device (None
on a CPU), and of named streams.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


def to_json(states: Mapping[str, Any]) -> dict[str, Any]:
    """``states`` as JSON."""
    version, words, gauss = states["random_rng_state"]
    kind, keys, *rest = states["np_rng_state"]
    on_device = states["cuda_rng_state"]
    streams = states["rng_tracker_states"]
    return {
        "random_rng_state": [version, list(words), gauss],
        "np_rng_state": [kind, np.asarray(keys).tolist(), *rest],
        "torch_rng_state": _to_text(states["torch_rng_state"]),
        "cuda_rng_state": None if on_device is None else _to_text(on_device),
        "rng_tracker_states": {name: _to_text(state) for name, state in streams.items()},
    }


def from_json(values: Mapping[str, Any]) -> dict[str, Any]:
    """The way back."""
    version, words, gauss = values["random_rng_state"]
    kind, keys, *rest = values["np_rng_state"]
    on_device = values["cuda_rng_state"]
    streams = values["rng_tracker_states"]
    return {
        "random_rng_state": (version, tuple(words), gauss),
        "np_rng_state": (kind, np.array(keys, dtype=np.uint32), *rest),
        "torch_rng_state": _to_tensor(values["torch_rng_state"]),
        "cuda_rng_state": None if on_device is None else _to_tensor(on_device),
        "rng_tracker_states": {name: _to_tensor(text) for name, text in streams.items()},
    }


def _to_text(state: Tensor) -> str:
    return base64.b64encode(state.cpu().numpy().tobytes()).decode()


def _to_tensor(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)

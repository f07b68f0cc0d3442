"""Convert the random generator states of a rank to JSON and back; byte tensors become base64.

The states have Megatron-LM's names and forms: python, numpy, torch, the device (None on CPU), and
named streams.
"""

from __future__ import annotations

import base64
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from megatron.core.config.value_types import JsonObject, StateDict, Unpickled


def to_json(states: StateDict) -> JsonObject:
    """Return ``states`` as JSON."""
    version, words, gauss = states["random_rng_state"]
    kind, keys, *rest = states["np_rng_state"]
    return {
        "random_rng_state": [version, list(words), gauss],
        "np_rng_state": [kind, np.asarray(keys).tolist(), *rest],
        **_tensors(states, _to_text),
    }


def from_json(values: JsonObject) -> StateDict:
    """Return the states that `to_json` converted."""
    version, words, gauss = values["random_rng_state"]
    kind, keys, *rest = values["np_rng_state"]
    return {
        "random_rng_state": (version, tuple(words), gauss),
        "np_rng_state": (kind, np.array(keys, dtype=np.uint32), *rest),
        **_tensors(values, _to_tensor),
    }


def _tensors(states: StateDict, convert: Callable[[Unpickled], str | Tensor]) -> StateDict:
    on_device, streams = states["cuda_rng_state"], states["rng_tracker_states"]
    return {
        "torch_rng_state": convert(states["torch_rng_state"]),
        "cuda_rng_state": None if on_device is None else convert(on_device),
        "rng_tracker_states": {name: convert(state) for name, state in streams.items()},
    }


def _to_text(state: Tensor) -> str:
    return base64.b64encode(state.cpu().numpy().tobytes()).decode()


def _to_tensor(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)

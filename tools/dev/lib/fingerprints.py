"""Short records of values that two programs have computed, and where they differ."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

_TOLERANCE = 2e-5  # fp32, other orders of additions


def fingerprint(value: Any) -> Any:
    """Return a value as JSON; a tensor as its shape, its sum, and two other sums."""
    if torch.is_tensor(value):
        flat = value.detach().double().reshape(-1)
        ramp = torch.linspace(1, 2, max(1, flat.numel()), dtype=torch.float64)[: flat.numel()]
        sums = flat.sum(), flat.abs().sum(), (flat * ramp).sum()
        return {"shape": list(value.shape), "sums": [round(float(x), 9) for x in sums]}
    if isinstance(value, dict):
        return {str(key): fingerprint(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [fingerprint(entry) for entry in value]
    return value if isinstance(value, int | float | str | None) else str(value)


def differences(expected: Any, found: Any, place: str = "") -> Iterator[str]:
    """Yield a sentence for each value that differs."""
    if isinstance(expected, dict) and isinstance(found, dict):
        for key in sorted(expected.keys() | found.keys(), key=str):
            if key in expected and key in found:
                yield from differences(expected[key], found[key], f"{place}.{key}")
            else:
                yield f"{place}.{key} is only {'expected' if key in expected else 'found'}"
    elif isinstance(expected, list | tuple) and isinstance(found, list | tuple):
        if len(expected) != len(found):
            yield f"{place}: {len(found)} entries, not {len(expected)}"
        for one, other in zip(expected, found, strict=False):
            yield from differences(one, other, place)
    elif torch.is_tensor(expected) and torch.is_tensor(found):
        if expected.shape != found.shape:
            yield f"{place}: {tuple(found.shape)}, not {tuple(expected.shape)}"
        elif not torch.allclose(found, expected, rtol=_TOLERANCE, atol=_TOLERANCE / 10):
            error = (found.double() - expected.double()).abs().max()
            yield f"{place}: differs by {error:.2g} of {expected.abs().max():.2g}"
    elif isinstance(expected, float) and isinstance(found, float | int):
        if abs(expected - found) > 2.5 * _TOLERANCE * max(1.0, abs(expected)):
            yield f"{place}: {found}, not {expected}"
    elif expected != found:
        yield f"{place}: {found}, not {expected}"

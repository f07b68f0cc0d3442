"""Programs written for Megatron Core get the values that NVIDIA's release computed for them.

`tools/dev/library_judge.py --record` wrote the values with NVIDIA's wheel.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.repo.source import ROOT
from tests.support.megatron_core_cases import CASES, run_cases
from tests.support.ranks import run_ranks
from tools.dev.lib.fingerprints import fingerprint

EXPECTED = json.loads((ROOT / "tests/golden/megatron_core_values.json").read_text())


def fingerprints(rank: int, world_size: int) -> dict[str, Any]:
    """Return the fingerprints of the values of all cases of this number of ranks."""
    return json.loads(json.dumps(fingerprint(run_cases(rank, world_size))))


def differences(expected: Any, found: Any, place: str) -> list[str]:
    """Return the places of values that differ."""
    if isinstance(expected, dict) and isinstance(found, dict):
        if expected.keys() != found.keys():
            return [f"{place}: {sorted(expected.keys() ^ found.keys())}"]
        return [d for k in expected for d in differences(expected[k], found[k], f"{place}.{k}")]
    if isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        pairs = zip(expected, found, strict=True)
        return [d for one, other in pairs for d in differences(one, other, place)]
    if isinstance(expected, float) and isinstance(found, float | int):
        is_close = abs(expected - found) <= 5e-5 * max(1.0, abs(expected))
        return [] if is_close else [f"{place}: {found}, not {expected}"]
    return [] if expected == found else [f"{place}: {found}, not {expected}"]


@pytest.mark.parametrize("world_size", sorted({ranks for ranks, _ in CASES.values()}))
def test_values_are_those_of_nvidias_release(world_size):
    found: dict[str, Any] = {}
    for values in run_ranks(fingerprints, world_size):
        found |= values
    expected = {name: EXPECTED[name] for name in found}
    assert not differences(expected, found, "")

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
from tools.dev.lib.fingerprints import differences, fingerprint

EXPECTED = json.loads((ROOT / "tests/golden/megatron_core_values.json").read_text())


def fingerprints(rank: int, world_size: int) -> dict[str, Any]:
    """Return the fingerprints of the values of all cases of this number of ranks."""
    return json.loads(json.dumps(fingerprint(run_cases(rank, world_size))))


@pytest.mark.parametrize("world_size", sorted({ranks for ranks, _ in CASES.values()}))
def test_values_are_those_of_nvidias_release(world_size):
    found: dict[str, Any] = {}
    for values in run_ranks(fingerprints, world_size):
        found |= values
    expected = {name: EXPECTED[name] for name in found}
    assert [*differences(expected, found)] == []

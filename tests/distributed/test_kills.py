"""Kills around saves; `make kill N=200` is a longer storm."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.kills import Storm


@pytest.mark.feature("Checkpoints: kill -9 of one rank or all, around a save: nothing is lost")
def test_ten_kills_around_saves_lose_nothing(tmp_path: Path) -> None:
    storm = Storm(tmp_path)
    for seed in range(10):
        storm.strike(seed)
    print(storm.summary())
    assert storm.wrong == []
    assert {"of all ranks", "of one rank", "in the background", "at once"} <= set(storm.outcomes)
    assert {"at a random moment", "at a named point"} <= set(storm.outcomes)

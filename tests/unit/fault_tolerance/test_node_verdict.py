"""Which nodes are unhealthy, from the measurements of all ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.core.config.errors import ConfigError
from megatron.training.fault_tolerance.node_checks import (
    RankResult,
    Thresholds,
    as_json,
    expectations,
    findings,
    read_expectations,
    table,
)
from tools.check_node import node_names


def result(rank: int, matmul: float = 100.0, **changes: Any) -> RankResult:
    fields: dict[str, Any] = {"bits": "ab", "rates": {"matmul": matmul}} | changes
    return RankResult(rank=rank, node=f"n{rank // 2}", device=fields.pop("device", "A"), **fields)


def texts(results: list[RankResult], expected: Any = None) -> list[str]:
    return [str(finding) for finding in findings(results, expected or {}, Thresholds())]


def test_equal_ranks_are_healthy() -> None:
    assert texts([result(rank, 90 + 5 * rank) for rank in range(6)]) == []
    assert texts([result(0)]) == []


def test_the_slow_rank_is_named_with_its_node() -> None:
    slow = [result(0), result(1), result(2, 60.0), result(3)]
    expected = "n1, rank 2: matmul: 60 TFLOP/s, like devices have 100 (limit 70%)"
    assert texts(slow) == [expected]
    assert texts([result(0, 60.0), result(1)])[0].startswith("n0, rank 0: matmul"), "of two too"


def test_a_disk_may_be_half_as_fast() -> None:
    rates = [{"disk read": 100.0}, {"disk read": 100.0}, {"disk read": 40.0}]
    results = [result(rank, rates=rate) for rank, rate in enumerate(rates)]
    assert texts(results) == []
    assert texts([*results, result(3, rates={"disk read": 30.0})])


def test_unlike_devices_are_not_compared() -> None:
    assert texts([result(0), result(1), result(2, 10.0, device="B", bits="cd")]) == []


def test_a_rate_below_the_expected_one_is_slow_everywhere() -> None:
    expected = {"A": {"rates": {"matmul": 200.0}, "bits": "ab"}}
    assert texts([result(0)], expected) == [
        "n0, rank 0: matmul: 100 TFLOP/s, expected are 200 (limit 70%)"
    ]
    assert texts([result(0, 150.0)], expected) == []


def test_a_device_with_other_bits_is_wrong() -> None:
    (text,) = texts([result(0), result(1, bits="cd"), result(2)])
    assert text.startswith("n0, rank 1: matmul: fixed computations give other bits than on most")
    assert "its results are wrong" in text
    both = texts([result(0), result(2, bits="cd")])
    assert [text.split(":")[0] for text in both] == ["n0, rank 0", "n1, rank 2"]
    assert "without a majority" in both[0]
    (alone,) = texts([result(0, bits="cd")], {"A": {"rates": {}, "bits": "ab"}})
    assert "other bits than expected" in alone


def test_a_clock_that_is_off_is_a_finding() -> None:
    (text,) = texts([result(0), result(1, clock_offset_s=-3.0)])
    assert text == "n0, rank 1: clock: -3.0 s to rank 0, at most 1.0 s"


def test_of_ranks_in_a_collective_the_one_that_never_came_is_named() -> None:
    waits = "no result (waits in world barrier)"
    absent = "no result (is in no collective)"
    results = [result(r, problems={"clock": waits}) for r in (0, 1)]
    assert len(texts(results)) == 2
    (text,) = texts([*results, result(2, problems={"clock": absent})])
    assert text == f"n1, rank 2: clock: {absent}"


def test_expectations_are_stored_and_read(tmp_path: Path) -> None:
    path = tmp_path / "expected.json"
    path.write_text(json.dumps(expectations([result(0, 90.0), result(1), result(2, 120.0)])))
    assert read_expectations(path) == {"A": {"rates": {"matmul": 100.0}, "bits": "ab"}}
    assert expectations([result(0), result(1, bits="x")])["A"]["bits"] == ""


@pytest.mark.parametrize("text", ["", "[]", '{"A": 3}', '{"A": {"rates": {"m": "x"}, "bits": ""}}'])
def test_a_damaged_file_of_expectations_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "x").write_text(text)
    with pytest.raises(ConfigError, match=r"--expect .*x: it "):
        read_expectations(tmp_path / "x")


def test_the_table_has_a_row_per_rank() -> None:
    lines = list(table([result(0), result(3, rates={"disk read": 0.125})]))
    assert lines[0].split() == (
        "rank node device matmul (TFLOP/s) disk read (MB/s) clock (ms)".split()
    )
    assert lines[1].split() == ["0", "n0", "A", "100", "-", "+0"]
    assert lines[2].split() == ["3", "n1", "A", "-", "0.125", "+0"]


def test_the_report_for_programs_names_the_nodes() -> None:
    results = [result(0), result(1), result(2, 60.0)]
    report = json.loads(as_json(results, findings(results, {}, Thresholds())))
    assert (report["healthy"], report["unhealthy_nodes"]) == (False, ["n1"])
    assert report["findings"][0]["check"] == "matmul"


def test_nodes_of_one_host_are_told_apart() -> None:
    assert node_names(["a 0", "a 0", "b 1", None]) == ["a", "a", "b", None]
    assert node_names(["a 0", "a 1", "b 2"]) == ["a/0", "a/1", "b"]

"""tools/dev/later_flags.py: how many flags of a later Megatron-LM are accepted."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.dev import later_flags

ROWS = """program_or_module,option strings,n_functional_configs
COMMON: all,--use-checkpoint-opt-param-scheduler (alias of --x),99
COMMON: all,--use-sharp,8
COMMON: all,--ict-load,3
COMMON: all,--progress-bar --no-progress-bar,2
COMMON: all,--flag-of-tomorrow,5
COMMON: all,--unused,0
tools/of_others.py,--flag-of-tomorrow,5
tools/of_others.py,--lr,1
"""


def test_flags_are_counted_by_state_and_by_the_cases_that_give_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "flags.csv"
    table.write_text(ROWS)
    monkeypatch.setattr("sys.argv", ["later_flags.py", str(table)])
    later_flags.main()
    *lacking, flags, pairs = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lacking] == [
        ["announced", "8", "--use-sharp"],
        ["announced", "2", "--progress-bar"],
        ["refused", "3", "--ict-load"],
        ["unknown", "5", "--flag-of-tomorrow"],
        ["unknown", "1", "--lr"],
    ]
    assert flags == "flags: 1 done, 2 announced, 1 refused, 2 unknown; 3 of 6 accepted"
    assert pairs.endswith("99 done, 10 announced, 3 refused, 6 unknown; 109 of 118 accepted")

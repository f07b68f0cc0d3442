"""Two runs are compared by every digit they show."""

from __future__ import annotations

import sys

import pytest

from tools.dev import loss_compare

LINE = (
    " [2031-04-05 06:07:08] iteration {:8d}/      10 | consumed samples:          640 | elapsed "
    "time per iteration (ms): 812.4 | learning rate: 1.250000E-04 | global batch size:    32 | "
    "lm loss: {:.6E} | loss scale: 1.0 | grad norm: {:.3f} | number of skipped iterations:   0 |\n"
)


def log(tmp_path, name, losses, start=1):
    path = tmp_path / name
    rows = [LINE.format(i, loss, 2 * loss) for i, loss in enumerate(losses, start)]
    path.write_text("some other line\n" + "".join(rows))
    return str(path)


def test_equal_logs_are_equal(tmp_path, capsys):
    a, b = (log(tmp_path, name, [9.5, 8.25]) for name in "ab")
    assert loss_compare.main([a, b]) == 0
    assert "2 iterations are equal in every digit: grad norm, lm loss" in capsys.readouterr().out


def test_the_first_difference_is_named(tmp_path, capsys):
    a = log(tmp_path, "a", [9.5, 8.25])
    b = log(tmp_path, "b", [9.5, 8.250001])
    assert loss_compare.main([a, b]) == 1
    assert "iteration 2: lm loss 8.250000E+00 is now 8.250001E+00" in capsys.readouterr().out


def test_a_missing_iteration_is_a_difference_unless_only_common_ones_count(tmp_path, capsys):
    a = log(tmp_path, "a", [9.5, 8.25, 7.0])
    b = log(tmp_path, "b", [7.0], start=3)
    assert loss_compare.main([a, b]) == 1
    assert "iterations that only one run has: [1, 2]" in capsys.readouterr().out
    assert loss_compare.main([a, b, "--common"]) == 0


def test_nothing_in_common_is_no_proof(tmp_path, capsys):
    a, b = log(tmp_path, "a", [9.5]), log(tmp_path, "b", [7.0], start=3)
    assert loss_compare.main([a, b, "--common"]) == 2
    assert "no iteration stands in both" in capsys.readouterr().err


def test_metrics_files_are_compared_to_the_last_bit(tmp_path):
    a, b = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    a.write_text('{"iteration": 1, "lm loss": 9.123456789012345}\n{"other": 1}\n')
    b.write_text('{"iteration": 1, "lm loss": 9.123456789012347}\n')
    assert loss_compare.main([str(a), str(a)]) == 0
    assert loss_compare.main([str(a), str(b)]) == 1


@pytest.mark.parametrize(("second", "code"), [("1.5", 0), ("1.25", 1)])
def test_commands_are_run_with_a_metrics_file(tmp_path, second, code):
    script = tmp_path / "run.py"
    script.write_text(
        "import sys\n"
        "loss, flag, path = sys.argv[1:]\n"
        "assert flag == '--metrics-file'\n"
        "open(path, 'w').write('{\"iteration\": 1, \"lm loss\": %s}' % loss)\n"
    )
    commands = [f"{sys.executable} {script} {loss}" for loss in ("1.5", second)]
    assert loss_compare.main(["--run", *commands]) == code

"""The root logger: level and speaking ranks."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from megatron.core.config.errors import ConfigError
from megatron.core.utils import divide, log_single_rank
from megatron.training.process.rank_print import setup_logging


@pytest.fixture(autouse=True)
def root_logger() -> Iterator[logging.Logger]:
    """The root logger as the program finds it; put back afterwards."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    yield root
    root.setLevel(level)
    root.handlers[:] = handlers


def _say(name: str = "megatron.x") -> None:
    logger = logging.getLogger(name)
    logger.debug("a debug line")
    logger.info("an info line")
    logger.warning("a warning")
    logger.error("an error")


def test_rank_0_prints_info_and_above(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(None)
    setup_logging(None)  # a second call adds no second handler
    _say()
    assert capsys.readouterr().out == "an info line\na warning\nan error\n"


def test_other_ranks_print_errors_and_what_is_meant_for_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")
    setup_logging(None)
    _say()
    logging.getLogger("x").info("from everybody", extra={"all_ranks": True})
    assert capsys.readouterr().out == "an error\nfrom everybody\n"


def test_lines_of_the_rerun_state_machine_have_the_format_that_scripts_search(
    capsys: pytest.CaptureFixture[str],
) -> None:
    setup_logging(None)
    _say("megatron.core.rerun_state_machine")
    assert capsys.readouterr().out.splitlines() == [
        "INFO:megatron.core.rerun_state_machine:an info line",
        "WARNING:megatron.core.rerun_state_machine:a warning",
        "ERROR:megatron.core.rerun_state_machine:an error",
    ]


def test_the_flag_wins_over_the_environment(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGATRON_LOGGING_LEVEL", "40")
    setup_logging(None)
    _say()
    assert capsys.readouterr().out == "an error\n"
    setup_logging(10)
    _say()
    assert capsys.readouterr().out.splitlines()[0] == "a debug line"


def test_a_level_by_name_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_LOGGING_LEVEL", "INFO")
    with pytest.raises(ConfigError, match="MEGATRON_LOGGING_LEVEL=INFO is not a number: use 10"):
        setup_logging(None)


def test_log_single_rank_logs_where_it_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(None)
    log_single_rank(logging.getLogger("x"), logging.INFO, "%d layers", 3)
    assert capsys.readouterr().out == "3 layers\n"


def test_divide_wants_no_remainder() -> None:
    assert divide(12, 4) == 3
    with pytest.raises(AssertionError, match="10 is not divisible by 4"):
        divide(10, 4)

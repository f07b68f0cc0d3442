"""The code stays small: tokens of packages, and no files that are pieces of a concept."""

from __future__ import annotations

from unittest import mock

from tests.repo import size
from tests.repo.source import ROOT, Source, project


def test_budgets_are_those_of_the_code() -> None:
    wrong = size.wrong_budgets(project())
    assert not wrong, "\n".join(wrong)


def test_a_package_over_or_far_below_its_budget_is_found() -> None:
    source = Source("megatron/core/x/a.py", '"""Doc."""\nimport os\nx = 1  # note\n')
    assert size.tokens_of_packages([source]) == {"core/x": 3}
    for budget, wrong in ((2, 1), (3, 0), (203, 0), (204, 1)):
        with mock.patch.object(size, "BUDGETS", {"core/x": budget}):
            assert len(size.wrong_budgets([source])) == wrong


def test_small_files_have_a_reason() -> None:
    found = size.small_files_without_reason(project())
    assert not found, "\n".join(found)


def test_a_small_file_without_a_reason_is_found() -> None:
    small = Source("megatron/core/x/a.py", "x = 1\n" * 59)
    large = Source("megatron/core/x/b.py", "x = 1\n" * 60)
    path_of_megatron = Source("megatron/core/enums.py", "x = 1\n")
    assert len(size.small_files_without_reason([small, large, path_of_megatron])) == 1


def test_files_with_a_reason_exist_and_are_small() -> None:
    for path in size.SMALL_FILES:
        lines = (ROOT / path).read_text().count("\n")
        assert lines < size.MIN_FILE_LINES, f"{path} has {lines} lines: drop its reason"

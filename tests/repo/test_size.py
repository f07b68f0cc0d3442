"""The code stays small: tokens of packages, and no files that are pieces of a concept."""

from __future__ import annotations

from unittest import mock

from tests.repo import size
from tests.repo.source import ROOT, Source, project


def test_packages_keep_their_budget_of_tokens() -> None:
    over = size.packages_over_budget(project())
    assert not over, "\n".join(over)


def test_a_package_over_its_budget_is_found() -> None:
    source = Source("megatron/core/x/a.py", '"""Doc."""\nimport os\nx = 1  # note\n')
    assert size.tokens_of_packages([source]) == {"core/x": 3}
    with mock.patch.object(size, "BUDGETS", {"core/x": 2}):
        assert len(size.packages_over_budget([source])) == 1
    with mock.patch.object(size, "BUDGETS", {"core/x": 3}):
        assert size.packages_over_budget([source]) == []


def test_budgets_are_not_far_above_the_code() -> None:
    """A budget far above the code would not report added code."""
    found = size.tokens_of_packages(project())
    loose = {
        package: (budget, found.get(package, 0))
        for package, budget in size.BUDGETS.items()
        if budget > 1.1 * found.get(package, 0) + 200
    }
    assert not loose, f"package: (budget, tokens): {loose}"


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

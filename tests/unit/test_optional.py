"""Optional packages: what a message says if one cannot be imported."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.core import optional


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    optional.why_missing.cache_clear()
    yield
    optional.why_missing.cache_clear()


def test_a_missing_package_is_named_as_pip_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(optional.MissingDependency) as error:
        optional.require("lm_eval.__main__", "tools/run_lm_eval.py")
    wanted = 'tools/run_lm_eval.py: lm_eval is not installed; pip install "lm-eval[api]"'
    assert str(error.value) == wanted


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("Found an empty package. Install it with\\npip3 or else.", "Found an empty package"),
        ("libcudart.so.13: cannot open", "libcudart.so.13: cannot open"),
        ("", ""),
    ],
)
def test_the_reason_why_a_package_does_not_import_is_one_sentence(
    text: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_package.py").write_text(f'raise RuntimeError("{text}")\n')
    monkeypatch.syspath_prepend(tmp_path)
    wanted = f"broken_package does not import: RuntimeError: {reason}"
    assert optional.why_missing("broken_package") == wanted

"""Generated pages are current; what the pages name exists."""

from __future__ import annotations

import re

import pytest

from tests.repo.source import ROOT
from tools import features, matrix, tree

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")])


def test_the_tree_page_is_current():
    is_current = tree.TARGET.read_text() == tree.render()
    assert is_current, "docs/tree.md is old: run make tree"


def test_the_table_of_features_is_current():
    is_current = features.table() in features.README.read_text()
    assert is_current, "README's table of features is old: run make tree"


def test_the_matrix_is_current():
    is_current = matrix.TARGET.read_text() == matrix.render()
    assert is_current, "docs/matrix.md is old: run make tree"


def test_every_feature_names_its_area_and_one_sentence():
    for area, sentence in features.collect():
        assert sentence, f"feature({area!r}): write 'Area: sentence'"
        assert "|" not in sentence, f"{sentence!r} would break the table"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_to_files_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text())
    dead = [to for to in links if "://" not in to and not (page.parent / to).exists()]
    assert not dead, f"{page.name} links to {dead}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_files_named_in_code_spans_exist(page):
    folders = "megatron|tools|tests|examples|docs"
    named = re.findall(rf"`((?:{folders})/[\w./-]+\.\w+)`", page.read_text())
    missing = [name for name in named if not (ROOT / name).exists()]
    assert not missing, f"{page.name} names {missing}"


def test_a_sentence_ends_at_its_full_stop(tmp_path):
    path = tmp_path / "x.py"
    path.write_text('"""Reads .bin files of e.g. GPT, fast.  More."""\n')
    assert tree.first_sentence(path) == "Reads .bin files of e.g. GPT, fast"

"""Generated pages can be written; what pages name exists."""

from __future__ import annotations

import ast
import re
import runpy
from collections.abc import Iterator

import pytest

from megatron.core import optional
from megatron.training.callbacks.trackers import TRACKERS
from tests.repo.source import ROOT, Source, project
from tools.dev import architecture, features, flags, matrix, tree

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")])


def test_the_tree_page_describes_every_file_of_the_project():
    lines = tree.render().splitlines()
    undescribed = [line for line in lines if re.fullmatch(r"\s+\S+\.(py|sh|cpp)", line)]
    assert not undescribed, f"give them a docstring: {undescribed}"
    assert any(line.split()[0] == "executor.py" for line in lines if line.strip())


def test_links_of_the_features_page_lead_to_tests():
    linked = re.findall(r"\]\(([^)]+)\)", features.render())
    assert linked
    assert all((features.TARGET.parent / to).exists() for to in linked)


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
    generated = {tool.TARGET for tool in (features, flags, matrix, tree)}
    missing = [n for n in named if not (ROOT / n).exists() and ROOT / n not in generated]
    assert not missing, f"{page.name} names {missing}"


def test_the_extras_of_the_readme_and_of_missing_packages_are_those_that_pip_knows():
    pyproject = (ROOT / "pyproject.toml").read_text()
    section = pyproject.split("[project.optional-dependencies]\n")[1].split("\n[")[0]
    extras = dict(re.findall(r"^(\w+) = (\[.*?\])$", section, re.MULTILINE | re.DOTALL))
    named = (ROOT / "README.md").read_text().split("Extras: ")[1].split("\n\n")[0]
    assert set(re.findall(r"`\[(\w+)\]`", named)) == set(extras)
    for package, extra in optional._EXTRA.items():
        distribution = _DISTRIBUTIONS.get(package.split(".")[0], package.split(".")[0])
        listed = {name.replace("-", "_") for name in re.findall(r'"([\w-]+)', extras[extra])}
        assert distribution.replace("-", "_") in listed, f"{package} is not in the extra {extra}"


# import name -> name for pip, where they differ
_DISTRIBUTIONS = {
    "PIL": "pillow",
    "faiss": "faiss-cpu",
    "megatron": "megatron-energon",
    "multistorageclient": "multi-storage-client",
    "yaml": "pyyaml",
}
# Packages without an extra: torch and sentencepiece are dependencies, pip finds the others
# by the names in the error message.
_WITHOUT_EXTRA = {"torch", "sentencepiece", "pynvml", "lm_eval", "deep_ep"}


def test_every_package_that_is_required_by_name_has_an_extra():
    known = {name.split(".")[0] for name in optional._EXTRA} | _WITHOUT_EXTRA
    named = set()
    for path in sorted(ROOT.glob("megatron/**/*.py")):
        text = path.read_text()
        named |= set(re.findall(r"""(?:^| |\()(?:optional\.)?require\(\s*["']([\w]+)""", text))
        constants = re.findall(r"\brequire\(\s*([A-Z_]+),", text)
        named |= {
            name for c in constants for name in re.findall(rf'^{c} = "(\w+)', text, re.MULTILINE)
        }
    assert {"deep_ep", "nvidia_resiliency_ext", "uvicorn"} <= named
    named |= {package for package, _ in TRACKERS.values()}
    assert named <= known, f"add them to megatron/core/optional.py: {named - known}"


def test_the_site_leads_to_every_page_and_its_modules_exist():
    conf = runpy.run_path(str(ROOT / "docs" / "conf.py"))
    index = [(ROOT / "docs" / "index.md").read_text()]
    conf["add_navigation"](None, "index", index)
    _, *trees = index[0].split("```{toctree}")
    listed = [line for tree in trees for line in tree.splitlines() if re.fullmatch(r"[\w/]+", line)]
    generated = {tool.TARGET for tool in (features, flags, matrix, tree)}
    pages = {p.stem for p in {*(ROOT / "docs").glob("*.md")} - generated} - {"index"}
    assert {page for page in listed if "/" not in page} - {t.stem for t in generated} == pages
    assert len(listed) == len({*listed})
    modules = " ".join(conf["_MODULES"].values()).split()
    found = [ROOT / module.replace(".", "/") for module in modules]
    assert all(path.with_suffix(".py").is_file() or path.is_dir() for path in found)


def test_a_sentence_ends_at_its_full_stop(tmp_path):
    path = tmp_path / "x.py"
    path.write_text('"""Reads .bin files of e.g. GPT, fast.  More."""\n')
    assert tree.first_sentence(path) == "Reads .bin files of e.g. GPT, fast"


def test_walks_of_the_architecture_page_are_those_of_the_code():
    for roots in architecture.WALKS.values():
        for root in roots:
            architecture.check(root)


def test_the_architecture_page_is_that_of_the_code():
    assert architecture.TARGET.read_text() == architecture.render(), "run `make docs`"


@pytest.mark.parametrize(
    "calls",
    [
        ["train_step.py:forward_backward", "setup.py:build_optimizer"],
        ["train_step.py:no_such_function"],
    ],
)
def test_a_walk_that_the_code_does_not_take_is_an_error(calls):
    file = "megatron/training/training.py"
    stops = [
        architecture.Stop(f"megatron/training/{at}", name)
        for at, _, name in (call.partition(":") for call in calls)
    ]
    with pytest.raises(LookupError, match="does not call"):
        architecture.check(architecture.Stop(file, "pretrain", tuple(stops)))


def test_calls_are_found_through_functions_of_a_file_in_their_order():
    calls = architecture.calls_of("megatron/training/training.py", "pretrain")
    order = [calls.index(n) for n in ("configure", "install_groups", "build_model_chunks", "train")]
    assert order == sorted(order)


def messages_of(source: Source) -> Iterator[str]:
    """Return the literal texts of a file, with a NUL for each value that is filled in."""
    for node in source.nodes:
        if isinstance(node, ast.JoinedStr):
            yield "".join(
                str(part.value) if isinstance(part, ast.Constant) else "\0" for part in node.values
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_messages_of_the_troubleshooting_page_are_those_of_the_code():
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    tables = re.findall(r"^\| message \|.*?\n\n", text + "\n", re.MULTILINE | re.DOTALL)
    quoted = [q for table in tables for q in re.findall(r"^\| `([^`]+)`", table, re.MULTILINE)]
    assert len(quoted) > 30
    said = [m for source in project() if source.is_under("megatron") for m in messages_of(source)]
    for message in quoted:
        parts = [part.strip() for part in message.split("...")]
        assert any(has_in_order(text, parts) for text in said), f"no message says {message!r}"


def has_in_order(text: str, parts: list[str]) -> bool:
    """Return whether the parts occur one after the other; a lazy pattern takes seconds for it."""
    end = 0
    for part in parts:
        start = text.find(part, end)
        if start < 0:
            return False
        end = start + len(part)
    return True

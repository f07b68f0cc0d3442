"""Pages, messages and docstrings use the words of the field, not invented ones."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.repo.source import ROOT, Source, dotted, project

# Unclear word -> what to write instead.
WORDS = {
    r"tokens (further )?ahead": "multi-token prediction (MTP), predicted tokens",
    r"(dealt|deals?|dealing) out": "sharded, partitioned, split",
    r"cut up": "sharded, partitioned, split",
    r"(is|are|was) told( of)?": "receives, is configured",
    r"whole again": "gathered, complete",
    r"undercut": "minimum",
    r"numbers in fp32": "main (fp32 master) parameters",
    r"(lends?|lent)": "passes, binds, returns",
    r"(hands?|handed|handing) (over|on)": "passes, sends, returns",
    r"comes now this way": "received both an autograd gradient and a fused main gradient",
    r"idle at both ends": "pipeline bubble",
    r"how ranks lie": "rank order",
    r"doors?": "compatibility API",
    r"travel(s|ed|led|ing|ling)?": "is sent, is communicated",
    r"(takes?|taken|took) over": "restores, adopts",
}
UNCLEAR = {re.compile(rf"\b{word}\b", re.IGNORECASE): plain for word, plain in WORDS.items()}

# What the law covers.  The generated pages repeat texts that it covers; history stays as it is.
PACKAGES = (
    "megatron/core/",
    "megatron/training/",
    "tools/",
)
PAGES = [
    page.relative_to(ROOT).as_posix()
    for page in sorted([*ROOT.glob("docs/**/*.md"), *ROOT.glob("*.md")])
    if page.name not in ("CHANGELOG.md", "flags.md", "features.md", "matrix.md", "tree.md")
]


def unclear(text: str) -> Iterator[str]:
    """Each unclear word in ``text``, and what to write instead."""
    joined = " ".join(text.split())
    for word, plain in UNCLEAR.items():
        if found := word.search(joined):
            yield f"{found[0]!r}: write {plain}"


def messages(source: Source) -> Iterator[tuple[int, str]]:
    """Line and text of the string literals that a user reads: raised, yielded or printed."""
    for node in source.nodes:
        shown: ast.AST | None = None
        if isinstance(node, ast.Raise | ast.Yield):
            shown = node
        elif isinstance(node, ast.Assert):
            shown = node.msg
        elif isinstance(node, ast.Call) and "print" in dotted(node.func).split(".")[-1]:
            shown = node
        if shown is not None:
            parts = [n for n in ast.walk(shown) if isinstance(n, ast.Constant)]
            texts = [n.value for n in parts if isinstance(n.value, str)]
            yield shown.lineno, "".join(texts)  # type: ignore[attr-defined]


def documentation(source: Source) -> Iterator[tuple[int, str]]:
    """Line and text of docstrings, and of the help texts of flags."""
    for node in source.nodes:
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            yield getattr(node, "lineno", 1), ast.get_docstring(node) or ""
        elif isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Call):
            parts = [n.value for n in node.value.args if isinstance(n, ast.Constant)]
            yield node.lineno, "".join(part for part in parts if isinstance(part, str))


def breaches(source: Source) -> list[str]:
    """Messages and documentation of a covered file with an unclear word."""
    if not source.path.startswith(PACKAGES):
        return []
    texts = (*documentation(source), *messages(source))
    return [f"{source.path}:{n}: {why}" for n, text in texts for why in unclear(text)]


def test_messages_and_docstrings_use_plain_words():
    found = [breach for source in project() for breach in breaches(source)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("page", PAGES)
def test_pages_use_plain_words(page):
    lines = (ROOT / page).read_text().splitlines()
    found = [f"{page}:{n}: {why}" for n, line in enumerate(lines, 1) for why in unclear(line)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "text",
    [
        "raise ValueError('layers cannot be dealt out to stages')",
        "def f():\n    yield f'{flag} 2: tokens ' 'ahead have no positions'",
        "assert x, f'{name} comes now this way, now that'",
        "print_rank_0('the wrapper hands over the gradient')",
        "log.print('a rate that is never Undercut')",
        "'''The wrapper hands over the gradient.'''",
        "class C:\n    x: int = option(0, 'Layers that are dealt out to stages.')",
    ],
)
def test_a_message_with_an_unclear_word_is_found(text):
    assert breaches(Source("megatron/core/x.py", text))
    assert breaches(Source("tools/x.py", text))


@pytest.mark.parametrize(
    "text",
    [
        "# The wrapper hands over the gradient.",
        "raise ValueError('use both hands; an overhead of one')",
        "print('a blend of data sets')",
    ],
)
def test_other_text_passes(text):
    assert not breaches(Source("megatron/core/x.py", text))

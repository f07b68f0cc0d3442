"""Pages and messages use the words of the field, not those that this project once invented."""

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
}
UNCLEAR = {re.compile(rf"\b{word}\b", re.IGNORECASE): plain for word, plain in WORDS.items()}

# What the law covers.  Both lists only grow.
PACKAGES = (
    "megatron/core/",
    "megatron/training/",
    "tools/",
)
# Not covered yet: their messages are listed in broken_command_lines.txt and change together.
LATER = (
    "megatron/core/transformer/layer_layout.py",
    "megatron/training/arguments/",
)
PAGES = (
    "docs/adding_a_callback.md",
    "docs/adding_a_check.md",
    "docs/adding_a_flag.md",
    "docs/adding_a_model.md",
    "docs/checkpoints.md",
    "docs/experts.md",
    "docs/index.md",
    "docs/launching.md",
    "docs/log.md",
    "docs/models.md",
    "docs/optimizers.md",
    "docs/parallelism.md",
    "docs/performance.md",
    "docs/porting.md",
    "docs/precision.md",
    "docs/quickstart.md",
    "docs/recipes.md",
    "docs/recompute.md",
    "docs/scaling.md",
    "docs/security.md",
    "README.md",
    "CONTRIBUTING.md",
)


def unclear(text: str) -> Iterator[str]:
    """Each unclear word in ``text``, and what to write instead."""
    for word, plain in UNCLEAR.items():
        if found := word.search(" ".join(text.split())):
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


def breaches(source: Source) -> list[str]:
    """Messages of a covered file with an unclear word."""
    if not source.path.startswith(PACKAGES) or source.path.startswith(LATER):
        return []
    return [f"{source.path}:{n}: {why}" for n, text in messages(source) for why in unclear(text)]


def test_messages_use_plain_words():
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
    ],
)
def test_a_message_with_an_unclear_word_is_found(text):
    assert breaches(Source("megatron/core/x.py", text))
    assert breaches(Source("tools/x.py", text))


@pytest.mark.parametrize(
    "text",
    [
        "'''The wrapper hands over the gradient.'''",
        "raise ValueError('use both hands; an overhead of one')",
        "print('a blend of data sets')",
    ],
)
def test_other_text_passes(text):
    assert not breaches(Source("megatron/core/x.py", text))


def test_what_is_not_covered_still_exists():
    assert all((ROOT / path).exists() for path in LATER)

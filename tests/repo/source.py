"""The project's own files as the laws see them: paths and syntax trees; nothing is imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("megatron", "tools", "examples", "tasks", "benchmarks", "tests")
SKIPPED_PARTS = {"__pycache__", ".venv", "build"}


@dataclass(frozen=True)
class Source:
    """One Python file; ``path`` is relative to the root, with slashes."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """Every node of the tree: most laws look at all of them, and a walk takes a while."""
        return tuple(ast.walk(self.tree))

    @property
    def module(self) -> str:
        """Dotted name: ``megatron/core/__init__.py`` is ``megatron.core``."""
        parts = self.path.removesuffix(".py").split("/")
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def is_under(self, *folders: str) -> bool:
        return self.path.split("/", 1)[0] in folders

    def imports(self) -> Iterator[tuple[int, str]]:
        """Line and dotted name of every import; ``from a import b`` gives ``a`` and ``a.b``."""
        package = (
            self.module if self.path.endswith("__init__.py") else self.module.rpartition(".")[0]
        )
        for node in self.nodes:
            if isinstance(node, ast.Import):
                yield from ((node.lineno, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    above = package.split(".")[: len(package.split(".")) - node.level + 1]
                    base = ".".join([*above, base] if base else above)
                yield node.lineno, base
                yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


@cache
def project() -> tuple[Source, ...]:
    """Every Python file of the project."""
    paths = sorted(ROOT.glob("*.py"))
    for folder in FOLDERS:
        paths += sorted((ROOT / folder).rglob("*.py"))
    return tuple(
        Source(path.relative_to(ROOT).as_posix(), path.read_text())
        for path in paths
        if not SKIPPED_PARTS.intersection(path.relative_to(ROOT).parts)
    )


def dotted(node: ast.AST) -> str:
    """``torch.cuda.is_available`` of the expression with that spelling, else an empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        left = dotted(node.value)
        return f"{left}.{node.attr}" if left else ""
    return ""


def functions(tree: ast.AST) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Qualified name and node of every function."""

    def walk(node: ast.AST, above: str) -> Iterator[tuple[str, ast.FunctionDef]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                continue  # most nodes, and no function is below one
            name = above
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{above}.{child.name}" if above else child.name
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield name, child
            yield from walk(child, name)

    yield from walk(tree, "")

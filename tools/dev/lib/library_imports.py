"""Import a project's modules that import megatron: python -m tools.dev.lib.library_imports PACKAGE.

Prints how many of them import, and for each error how many modules it stops;
`tools/dev/library_projects.py` reads these lines.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
import traceback
from collections import Counter
from pathlib import Path

from tools.dev.lib import supplied_names

_FAILURES = (ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NameError)
_OTHERS = (OSError, RuntimeError, SyntaxError, TypeError, ValueError)


def main(package: str) -> None:
    """Import, and print the table."""
    supplied_names.prepare(package)
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(package)
    root = Path(spec.origin).parent
    errors: Counter[str] = Counter()
    wanted = [file for file in sorted(root.rglob("*.py")) if imports_megatron(file, package)]
    for file in wanted:
        parts = file.relative_to(root).with_suffix("").parts
        name = ".".join((package, *parts)).removesuffix(".__init__")
        try:
            importlib.import_module(name)
        except (*_FAILURES, *_OTHERS) as error:
            places = [
                f for f in traceback.extract_tb(error.__traceback__) if str(root) in f.filename
            ]
            place = places[-1] if places else traceback.FrameSummary(str(file), 0, "")
            errors[f"{Path(place.filename).name}:{place.lineno}: {error!r}"[:200]] += 1
    print(f"imports: {len(wanted) - sum(errors.values())} of {len(wanted)} modules import")
    for text, count in errors.most_common():
        print(f"imports:   {count} x {text}")


def imports_megatron(file: Path, package: str) -> bool:
    """Return whether the file imports Megatron, besides ``package`` itself."""
    names = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.append(node.module or "")
    return any(n.startswith("megatron") and not n.startswith(package) for n in names)


if __name__ == "__main__":
    main(sys.argv[1])

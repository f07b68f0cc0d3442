"""Size of the project's code: tokens of each package, and files that are too small to be a concept.

A token is one of Python's, without comments, docstrings and imports: it measures how much there is
to understand, whatever the line breaks are.
"""

from __future__ import annotations

import ast
import io
import json
import tokenize
from collections.abc import Iterable

from tests.repo.source import ROOT, Source, project

# Package of megatron -> tokens that it may have.  A feature that needs more raises its number, with
# a reason in the commit; a removal lowers it.
BUDGETS: dict[str, int] = {
    ".": 50,
    "core": 13450,
    "core/compat": 12330,
    "core/config": 3450,
    "core/datasets": 45350,
    "core/device": 4850,
    "core/diagnostics": 4750,
    "core/dist_checkpointing": 48450,
    "core/distributed": 11500,
    "core/export": 4000,
    "core/extensions": 4650,
    "core/fusions": 40350,
    "core/inference": 46750,
    "core/models": 28150,
    "core/optimizer": 18150,
    "core/parallel": 10100,
    "core/params": 3700,
    "core/peft": 6500,
    "core/pipeline_parallel": 7400,
    "core/quantization": 9150,
    "core/rerun": 5350,
    "core/ssm": 11450,
    "core/tensor_parallel": 14540,
    "core/transformer": 67750,
    "core/virtual_ranks": 3800,
    "inference": 9850,
    "inference/server": 30750,
    "legacy": 0,
    "legacy/model": 0,
    "post_training": 3200,
    "post_training/distillation": 7450,
    "post_training/preference": 2950,
    "post_training/pruning": 3350,
    "post_training/rl": 8200,
    "post_training/sft": 3750,
    "training": 6700,
    "training/arguments": 24600,
    "training/callbacks": 11920,
    "training/checkpointing": 13950,
    "training/compat": 3900,
    "training/config": 9250,
    "training/conversion": 56450,
    "training/data": 10000,
    "training/datasets": 0,
    "training/estimates": 5900,
    "training/fault_tolerance": 15900,
    "training/models": 10950,
    "training/planning": 10400,
    "training/preprocess": 10100,
    "training/process": 4400,
    "training/runtime": 5350,
    "training/step": 5500,
    "training/tokenizer": 13250,
}

# A file is a concept.  One below this many lines is read together with another one: merge them.
MIN_FILE_LINES = 60
# Smaller files that neither Megatron-LM's import paths nor `__init__.py` explain, and the reason.
_OF_MEGATRON = "an import path of Megatron-LM without a name of its own"
_IN_ALL = "imported by several packages, none of which may import another"
SMALL_FILES: dict[str, str] = {
    "megatron/core/config/value_types.py": _IN_ALL,
    "megatron/core/device/async_host_copy.py": "tests recognize waits of the host by this file",
    "megatron/core/diagnostics/log_once.py": _IN_ALL,
    "megatron/core/dist_checkpointing/key_names.py": "modules read it without importing formats",
    "megatron/training/compat/names.py": "the table of import paths, which has few entries",
    "megatron/core/fusions/adam_step.py": "kernels of CPU and GPU share it without importing both",
    "megatron/core/process_memory.py": "imports no torch: programs that prepare data read it",
    "megatron/core/rank_local.py": _IN_ALL,
    "megatron/core/registry.py": _IN_ALL,
    "megatron/training/arguments/sections.py": _IN_ALL,
    "megatron/training/arguments/tokenizer_flags.py": "imports no torch: programs read it first",
    "megatron/training/config/preference.py": "a section of the configuration",
    "megatron/training/process/early_sigterm.py": "imported before everything else",
}

_MODULES_OF_MEGATRON = "tests/golden/modules.json"
_NOT_COUNTED = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def count_tokens(source: Source) -> int:
    """Return the number of tokens of a file without comments, docstrings and imports."""
    skipped: set[int] = set()
    for node in source.nodes:
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if ast.get_docstring(node) is not None:
                skipped.update(_lines(node.body[0]))
        elif isinstance(node, ast.Import | ast.ImportFrom):
            skipped.update(_lines(node))
    found = tokenize.generate_tokens(io.StringIO(source.text).readline)
    return sum(t.type not in _NOT_COUNTED and t.start[0] not in skipped for t in found)


def _lines(node: ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def package_of(source: Source) -> str:
    """Return ``core/transformer`` for a file below that folder, else the folder of the file."""
    return "/".join(source.path.split("/")[1:-1][:2]) or "."


def tokens_of_packages(sources: Iterable[Source]) -> dict[str, int]:
    """Return the tokens of each package of megatron."""
    totals: dict[str, int] = {}
    for source in sources:
        if source.is_under("megatron"):
            package = package_of(source)
            totals[package] = totals.get(package, 0) + count_tokens(source)
    return totals


def wrong_budgets(sources: Iterable[Source]) -> list[str]:
    """Return a message for each package whose budget is too small, or far above its tokens.

    A budget far above the code would not report added code.
    """
    found = tokens_of_packages(sources)
    return [
        f"megatron/{package}: {tokens} tokens, budget {BUDGETS.get(package, 0)}: remove code, or "
        "raise the budget in tests/repo/size.py and say why"
        for package, tokens in sorted(found.items())
        if tokens > BUDGETS.get(package, 0)
    ] + [
        f"megatron/{package}: {found.get(package, 0)} tokens, budget {budget}: lower it in "
        "tests/repo/size.py"
        for package, budget in BUDGETS.items()
        if budget > 1.1 * found.get(package, 0) + 200
    ]


def small_files_without_reason(sources: Iterable[Source]) -> list[str]:
    """Return a message for each small file of megatron that nothing explains."""
    modules = set(json.loads((ROOT / _MODULES_OF_MEGATRON).read_text()))
    return [
        f"{source.path}: {lines} lines, at least {MIN_FILE_LINES}: merge it with its users, or "
        "give the reason in tests/repo/size.py"
        for source in sources
        if source.is_under("megatron")
        and not source.path.endswith("__init__.py")
        and source.module not in modules
        and source.path not in SMALL_FILES
        and (lines := source.text.count("\n")) < MIN_FILE_LINES
    ]


if __name__ == "__main__":
    for name, number in sorted(tokens_of_packages(project()).items()):
        print(f'    "{name}": {number},')
    print("\n".join(small_files_without_reason(project())))

"""What may not stand in a file.  Each law yields sentences; an empty law is kept."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.repo.source import Source, dotted, functions

MAX_FILE_LINES = 700
MAX_FUNCTION_LINES = 80

# "path" or "path:function" -> (lines allowed, date and reason).  This table only shrinks.
SIZE_EXCEPTIONS: dict[str, tuple[int, str]] = {}

DEVICE_FILE = "megatron/core/device/__init__.py"
CUDA_EMULATION = "tools/dev/lib/emulated_cuda.py"  # replaces functions of torch.cuda
DEVICE_NAME = re.compile(r"(cuda|cpu|xpu|mps|hpu)(:\d+)?")

# Files that translate between namespaces and configs, or read configs of other projects: there a
# name is data.
ARGUMENT_FACADES = (
    *("megatron/training/arguments/", "megatron/training/compat/global_vars.py"),
    "megatron/core/compat/",
)

# Where leaving the process is the job, and why.
MAY_EXIT = {
    "megatron/training/training.py": "pretrain() is the main of every training script",
    "megatron/training/initialize.py": "--check-only ends the program after its report",
    "megatron/core/datasets/samplers.py": "a thread ends its reading process, busy or not",
    "megatron/core/diagnostics/fault_injection.py": "a waiting collective cannot unwind",
}

# Globals that belong to the process, not to the rank, and why.
OF_THE_PROCESS = {
    "megatron/core/virtual_ranks/transport.py": "the network that all its ranks talk over",
}

COMPILERS = {"distutils", "setuptools", "torch.utils.cpp_extension"}
UNPICKLERS = {"load", "loads", "Unpickler"}
UNPICKLER_FILE = "megatron/core/dist_checkpointing/megatron_formats/unpickler.py"


def files_are_short(source: Source) -> Iterator[str]:
    lines = source.text.count("\n")
    allowed, _ = SIZE_EXCEPTIONS.get(source.path, (MAX_FILE_LINES, ""))
    if lines > allowed:
        yield f"{lines} lines, at most {allowed}: split it"


def functions_are_short(source: Source) -> Iterator[str]:
    for name, node in functions(source.tree):
        lines = (node.end_lineno or 0) - node.lineno + 1
        allowed, _ = SIZE_EXCEPTIONS.get(f"{source.path}:{name}", (MAX_FUNCTION_LINES, ""))
        if lines > allowed:
            yield f"{node.lineno}: {name} has {lines} lines, at most {allowed}"


def files_say_what_they_are_for(source: Source) -> Iterator[str]:
    if source.tree.body and not ast.get_docstring(source.tree):
        yield "1: no module docstring"


def files_are_ascii(source: Source) -> Iterator[str]:
    for number, line in enumerate(source.text.splitlines(), 1):
        if not line.isascii():
            yield f"{number}: not ASCII"


def todos_name_their_end(source: Source) -> Iterator[str]:
    for number, line in enumerate(source.text.splitlines(), 1):
        if re.search(r"#.*\b(TO[D]O|FIX[M]E|XX[X])\b(?!\(until )", line):
            yield f"{number}: write the condition that removes it: (until ...)"


def nothing_in_megatron_calls_get_args(source: Source) -> Iterator[str]:
    if not source.is_under("megatron"):
        return
    for node in source.nodes:
        name = dotted(node.func) if isinstance(node, ast.Call) else ""
        if name.split(".")[-1] == "get_args" and name != "typing.get_args":
            yield f"{node.lineno}: calls {name}"


def one_file_knows_devices(source: Source) -> Iterator[str]:
    """No torch.cuda, no .cuda(), no device string outside core/device.py.

    Values a flag may take (``choices=``, ``Literal``) and docstrings are no device strings.
    """
    if source.path in (DEVICE_FILE, CUDA_EMULATION) or source.is_under("tests", "benchmarks"):
        return
    listed = {
        inner
        for node in source.nodes
        if isinstance(node, ast.keyword)
        and node.arg == "choices"
        or isinstance(node, ast.Subscript)
        and dotted(node.value).split(".")[-1] == "Literal"
        for inner in ast.walk(node)
    }
    for node in source.nodes:
        if isinstance(node, ast.Attribute) and dotted(node) == "torch.cuda":
            yield f"{node.lineno}: torch.cuda"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.cuda"):
            yield f"{node.lineno}: imports from torch.cuda"
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "cuda":
            yield f"{node.lineno}: .cuda()"
        if (
            isinstance(node, ast.Constant)
            and node not in listed
            and isinstance(node.value, str)
            and DEVICE_NAME.fullmatch(node.value)
        ):
            yield f"{node.lineno}: device string {node.value!r}"


def nothing_is_unpickled(source: Source) -> Iterator[str]:
    """A file from elsewhere must not be able to run code."""
    if source.is_under("tests"):
        return
    for node in source.nodes:
        bases = node.bases if isinstance(node, ast.ClassDef) else []
        is_unpickler = any(dotted(base).split(".")[-1] == "Unpickler" for base in bases)
        if is_unpickler and source.path != UNPICKLER_FILE:
            yield f"{node.lineno}: an unpickler; {UNPICKLER_FILE} is the one"
        if not isinstance(node, ast.Call):
            continue
        name = dotted(node.func)
        module, _, function = name.rpartition(".")
        keywords = {k.arg: k.value for k in node.keywords}
        if module in {"pickle", "cPickle", "dill", "marshal"} and function in UNPICKLERS:
            yield f"{node.lineno}: {name}"
        elif name == "torch.load" and not _is_true(keywords.get("weights_only")):
            yield f"{node.lineno}: torch.load without weights_only=True"
        elif name in {"np.load", "numpy.load"} and _is_true(keywords.get("allow_pickle")):
            yield f"{node.lineno}: {name} with allow_pickle=True"


def _is_true(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


def nothing_is_compiled_at_run_time(source: Source) -> Iterator[str]:
    """megatron starts no program but its own; Triton and torch.compile are their own affair.

    A process is started as ``subprocess.Popen([sys.executable, ...])``: Python compiles nothing.
    """
    if not source.is_under("megatron"):
        return
    for line, name in source.imports():
        if any(name == c or name.startswith((f"{c}.", "subprocess.")) for c in COMPILERS):
            yield f"{line}: imports {name}"
    for node in source.nodes:
        if not isinstance(node, ast.Call):
            continue
        called = dotted(node.func)
        if re.fullmatch(r"os\.(system|popen|exec\w*|(posix_)?spawn\w*)", called) or (
            called.startswith("subprocess.") and not _starts_python(node)
        ):
            yield f"{node.lineno}: {called}"


def _starts_python(call: ast.Call) -> bool:
    """Whether the program that a call of subprocess starts is this Python."""
    words = call.args[0] if call.args else None
    return isinstance(words, ast.List) and dotted(words.elts[0]) == "sys.executable"


def configs_are_read_by_name(source: Source) -> Iterator[str]:
    """A config has its fields: no hasattr, getattr or setattr on one, and no write to one."""
    if not source.is_under("megatron") or source.path.startswith(ARGUMENT_FACADES):
        return
    for node in source.nodes:
        if isinstance(node, ast.Call) and node.args:
            called, subject = dotted(node.func), dotted(node.args[0])
            if called in {"hasattr", "getattr", "setattr"} and _is_config(subject):
                yield f"{node.lineno}: {called}({subject}, ...)"
        elif isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Attribute) and _is_config(dotted(target.value)):
                    yield f"{node.lineno}: writes to {dotted(target)}"


def _is_config(name: str) -> bool:
    last = name.rpartition(".")[2]
    return last in {"config", "cfg", "args"} or last.endswith(("_config", "_args"))


def nothing_is_caught_blindly(source: Source) -> Iterator[str]:
    """``except Exception`` only where the handler raises again, or asks for a package."""
    if source.is_under("tests") or source.path == "megatron/core/optional.py":
        return
    for node in source.nodes:
        if isinstance(node, ast.ExceptHandler):
            caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            is_blanket = any(
                c is None or dotted(c) in {"Exception", "BaseException"} for c in caught
            )
            if is_blanket and not isinstance(node.body[-1], ast.Raise):
                yield f"{node.lineno}: blanket except that does not raise"


def globals_say_whose_they_are(source: Source) -> Iterator[str]:
    """A global that is written to belongs to a rank, of which a process may hold several."""
    if not source.is_under("megatron") or source.path in OF_THE_PROCESS:
        return
    owned = {
        argument.value
        for node in source.nodes
        if isinstance(node, ast.Call) and dotted(node.func) == "each_rank_owns"
        for argument in node.args
        if isinstance(argument, ast.Constant)
    }
    for node in source.nodes:
        if isinstance(node, ast.Global):
            for name in sorted(set(node.names) - owned):
                yield f'{node.lineno}: global {name} without each_rank_owns(__name__, "{name}")'


def the_library_does_not_exit(source: Source) -> Iterator[str]:
    if not source.is_under("megatron") or source.path in MAY_EXIT:
        return
    for node in source.nodes:
        name = dotted(node.func) if isinstance(node, ast.Call) else ""
        if name in {"exit", "quit", "sys.exit", "os._exit", "os.abort", "SystemExit"}:
            yield f"{node.lineno}: {name}()"


LAWS = [
    files_are_short,
    functions_are_short,
    files_say_what_they_are_for,
    files_are_ascii,
    todos_name_their_end,
    nothing_in_megatron_calls_get_args,
    one_file_knows_devices,
    nothing_is_unpickled,
    nothing_is_compiled_at_run_time,
    configs_are_read_by_name,
    nothing_is_caught_blindly,
    globals_say_whose_they_are,
    the_library_does_not_exit,
]

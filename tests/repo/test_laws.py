"""The laws of the repository hold, and each of them can be broken."""

from __future__ import annotations

import re

import pytest

from tests.repo import laws_of_code, laws_of_imports
from tests.repo.source import ROOT, Source, functions, project

LAWS = laws_of_imports.LAWS + laws_of_code.LAWS

# law -> files that break it: path and text
BREACHES = {
    "core_packages_keep_their_direction": [
        ("megatron/core/models/gpt/x.py", "from megatron.core.inference import engine"),
        ("megatron/core/transformer/x.py", "from megatron.core import models"),
        ("megatron/core/parallel/rank_grid.py", "import megatron.core.transformer.mlp"),
        ("megatron/core/transformer/x.py", "from ..models import gpt"),
        ("megatron/core/unheard_of/x.py", "import os"),
    ],
    "training_packages_keep_their_layers": [
        ("megatron/training/runtime/x.py", "from megatron.training.step.train_step import f"),
        ("megatron/training/step/x.py", "from megatron.training import pretrain"),
        ("megatron/training/x.py", "import os"),
        (
            "megatron/training/data/x.py",
            "if TYPE_CHECKING:\n    from megatron.training.checkpointing.load import load_run",
        ),
    ],
    "imports_point_downwards": [
        ("megatron/core/x.py", "from megatron.training.runtime.context import TrainState"),
        ("megatron/training/x.py", "import tools.preprocess_data"),
        ("megatron/core/x.py", "from megatron.inference.text import Detokenizer"),
        ("megatron/training/x.py", "import megatron.inference"),
        ("megatron/training/x.py", "from megatron.post_training.sft import dataset"),
        ("megatron/training/models/x.py", "SFT = 'megatron.post_training.sft.objective:GPT_SFT'"),
        ("megatron/inference/x.py", "import megatron.post_training"),
        ("tools/x.py", "from tests.support.ranks import run_ranks"),
    ],
    "only_the_compatibility_api_reads_global_state": [
        ("megatron/core/transformer/x.py", "from megatron.core import parallel_state"),
        (
            "megatron/training/step/train_step.py",
            "from megatron.training.compat.global_vars import get_run",
        ),
    ],
    "pure_modules_import_no_torch": [
        ("megatron/core/config/x.py", "import torch.nn"),
        ("megatron/inference/server/x.py", "from torch import Tensor"),
    ],
    "imports_stand_at_the_top": [
        ("megatron/core/x.py", "def f():\n    import os"),
        ("tools/x.py", "class A:\n    def main(self):\n        import os"),
    ],
    "kernels_alone_import_triton": [
        ("megatron/core/x.py", "import triton.language as tl"),
        ("megatron/core/fusions/x.py", "from megatron.core.fusions.triton import rope"),
    ],
    "files_are_short": [("megatron/core/x.py", "x = 1\n" * 701)],
    "functions_are_short": [("tools/x.py", "def f():\n" + "    x = 1\n" * 80)],
    "files_say_what_they_are_for": [("tests/x.py", "x = 1")],
    "files_are_ascii": [("tests/x.py", 'x = "\u00e9"')],
    "todos_name_their_end": [("tests/x.py", "x = 1  # TO" + "DO: later")],
    "nothing_in_megatron_calls_get_args": [("megatron/core/x.py", "a = global_vars.get_args()")],
    "one_file_knows_devices": [
        ("megatron/core/x.py", "torch.cuda.synchronize()"),
        ("megatron/core/x.py", "from torch.cuda import Stream"),
        ("megatron/core/x.py", "x.cuda()"),
        ("tools/x.py", "x.to('cuda:0')"),
        ("pretrain_gpt.py", "torch.zeros(1, device='cpu')"),
    ],
    "globals_say_whose_they_are": [
        ("megatron/core/x.py", "_x = 1\neach_rank_owns(__name__, '_y')\ndef f():\n    global _x"),
    ],
    "nothing_is_unpickled": [
        ("megatron/core/x.py", "pickle.load(f)"),
        ("tools/x.py", "torch.load(f)"),
        ("tools/x.py", "torch.load(f, weights_only=False)"),
        ("tools/x.py", "np.load(f, allow_pickle=True)"),
        ("megatron/core/x.py", "class Mine(pickle.Unpickler):\n    pass"),
    ],
    "nothing_is_compiled_at_run_time": [
        ("megatron/core/x.py", "subprocess.run(['make'])"),
        ("megatron/core/x.py", "from subprocess import run"),
        ("megatron/core/x.py", "from torch.utils import cpp_extension"),
        ("megatron/core/x.py", "os.system('make')"),
    ],
    "configs_are_read_by_name": [
        ("megatron/core/x.py", "hasattr(self.config, 'x')"),
        ("megatron/core/x.py", "getattr(args, 'x', None)"),
        ("megatron/core/x.py", "self.config.x = 1"),
        ("megatron/core/x.py", "ddp_config.x += 1"),
    ],
    "nothing_is_caught_blindly": [
        ("tools/x.py", "try:\n    f()\nexcept:\n    pass"),
        ("tools/x.py", "try:\n    f()\nexcept (ValueError, Exception) as e:\n    print(e)"),
    ],
    "the_library_does_not_exit": [
        ("megatron/core/x.py", "sys.exit(1)"),
        ("megatron/core/x.py", "raise SystemExit(1)"),
    ],
}

# What looks like a breach and is none.
ALLOWED = [
    ("megatron/core/transformer/x.py", "from megatron.core.tensor_parallel import layers"),
    ("megatron/post_training/x.py", "from megatron.training.training import pretrain"),
    ("megatron/core/x.py", "import typing\na = typing.get_args(x)"),
    ("megatron/core/x.py", "def __getattr__(name):\n    import os"),
    ("tools/x.py", "def main():\n    import os"),
    ("megatron/training/config/x.py", "x = option('auto', choices=('auto', 'cuda', 'cpu'))"),
    ("megatron/core/x.py", "Kind = Literal['cpu', 'cuda']"),
    ("megatron/core/x.py", "try:\n    f()\nexcept Exception as e:\n    raise DataError from e"),
    ("megatron/core/x.py", "self.config = config"),
    ("megatron/core/device/__init__.py", "torch.cuda.synchronize()"),
]


def test_the_project_keeps_the_laws():
    """One test: in several processes, each would parse all files."""
    broken = [
        f"{law.__name__}: {source.path}:{why}"
        for law in LAWS
        for source in project()
        for why in law(source)
    ]
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_the_law_can_be_broken(law):
    for path, text in BREACHES[law.__name__]:
        assert list(law(Source(path, text))), f"{law.__name__} passes {path}: {text}"


@pytest.mark.parametrize(("path", "text"), ALLOWED)
def test_what_is_allowed_passes(path, text):
    source = Source(path, f'"""Doc."""\n{text}\n')
    assert [why for law in LAWS for why in law(source)] == []


def test_the_table_of_long_files_only_shrinks():
    sizes = {}
    for source in project():
        sizes[source.path] = source.text.count("\n")
        for name, node in functions(source.tree):
            sizes[f"{source.path}:{name}"] = (node.end_lineno or 0) - node.lineno + 1
    for name, (allowed, reason) in laws_of_code.SIZE_EXCEPTIONS.items():
        assert re.match(r"\d{4}-\d\d-\d\d ", reason), f"{name}: the reason starts with a date"
        assert sizes.get(name) == allowed, f"{name} has {sizes.get(name)} lines now, not {allowed}"


def test_every_door_and_every_exit_still_exists():
    named = set(laws_of_code.MAY_EXIT)
    existing = {source.path for source in project()}
    assert named <= existing, f"no longer there: {sorted(named - existing)}"


def test_the_project_speaks_only_of_itself():
    """No path of a machine it was written on, and nobody's tools."""
    words = re.compile(
        r"(?<!\w)/work/|/root/|/tmp/venv|/\.library\b|\bclaude\b|\banthropic\b", re.I
    )
    suffixes = {".py", ".md", ".sh", ".toml", ".yaml", ".yml", ".cpp", ".txt", ""}
    tops = ["*.*", "Makefile", ".ci/*", "docs/**/*", "examples/**/*", "megatron/**/*"]
    tops += ["tests/**/*", "tools/**/*", "benchmarks/**/*"]
    found = []
    for path in {p for top in tops for p in ROOT.glob(top) if p.is_file()} - {
        ROOT / "tests/repo/test_laws.py"
    }:
        is_git = path.name == ".git"  # a file in a second working tree
        if path.suffix in suffixes and "__pycache__" not in path.parts and not is_git:
            for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
                if words.search(line):
                    found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert not found, "\n".join(found)

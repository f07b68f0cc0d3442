"""Who may import whom.  Each law yields sentences; an empty law is kept.

Package directions of megatron.core, narrowest first: the base (files directly in core), config,
device, parallel, params, diagnostics and rerun, then what builds on them.  Only the compatibility
API may import parallel_state and global_vars: functions that scripts call without process groups or
a run.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.repo.source import Source, functions

BASE = {"base", "config", "device", "parallel", "params", "diagnostics", "rerun"}
_LOWER = BASE | {"dist_checkpointing"}
_MIDDLE = _LOWER | {"fusions", "tensor_parallel", "transformer", "ssm"}
_UPPER = _MIDDLE | {"extensions", "models"}

# Package of megatron/core -> what it may import of megatron/core, besides itself.
MAY_IMPORT = {
    "base": BASE,  # file by file; megatron.core.utils offers helpers of all of them
    "config": {"base"},
    "device": {"base", "config"},
    "parallel": {"base", "config", "device"},
    "params": {"base", "config", "device", "parallel"},
    "diagnostics": {"base", "config", "device", "parallel"},
    "rerun": {"base", "config", "device"},
    "fusions": BASE,
    "datasets": BASE,
    "dist_checkpointing": BASE,
    "pipeline_parallel": BASE | {"tensor_parallel"},  # passes of weight gradients
    "virtual_ranks": BASE,
    "tensor_parallel": _LOWER | {"fusions"},
    "distributed": _LOWER,
    "optimizer": _LOWER | {"distributed", "fusions"},
    "transformer": _LOWER | {"fusions", "tensor_parallel", "pipeline_parallel"},  # where stages lie
    "ssm": _LOWER | {"fusions", "tensor_parallel", "transformer"},
    "peft": _MIDDLE,
    "extensions": _MIDDLE,
    "models": _MIDDLE | {"extensions"},
    "quantization": _UPPER,
    "inference": _UPPER | {"quantization"},
    "export": _UPPER | {"quantization"},
    "compat": _UPPER | {"quantization", "inference", "distributed", "optimizer", "datasets"},
}

# Packages of megatron/training, lowest first.  A package imports only packages of lower rows: what
# was asked (config), what it describes (models), how it is read (arguments), what runs (runtime),
# what it reads and saves, a step, what happens around it (callbacks), the loop (entry).
TRAINING_LAYERS = (
    {"config"},
    {"tokenizer", "process"},
    {"preprocess"},
    {"fault_tolerance"},
    {"models"},
    {"estimates"},
    {"arguments"},
    {"runtime"},
    {"data", "checkpointing"},
    {"step"},
    {"callbacks", "planning"},
    {"compat"},
    {"entry"},  # files directly in megatron/training
    {"conversion"},
)
_ENTRY_ROW = TRAINING_LAYERS.index({"entry"})
ENTRY = {"__init__", "initialize", "startup_log", "training"}
# Files directly in megatron/training that exist because Megatron-LM has their import path.
MEGATRON_PATHS = {
    "ft_integration",
    "global_vars",
    "inprocess_restart",
    "utils",
    "yaml_arguments",
    "datasets",
}

# Post-training is above these: it registers its objectives with them.
BELOW_POST_TRAINING = ("megatron/core/", "megatron/training/", "megatron/inference/")
# Import paths of Megatron-LM, for scripts only, whose modules are in post-training.
PATHS_ABOVE = {"megatron/training/datasets/sft_dataset.py"}

# Modules with global state -> files of the compatibility API that may import them: functions that
# scripts written for Megatron-LM call without process groups or a run.
COMPATIBILITY_API = {
    # Megatron Core's names for what has another form here.
    "megatron.core.compat": {
        "megatron/core/__init__.py",
        "megatron/training/__init__.py",
        "megatron/training/compat/names.py",
    },
    # Import paths of Megatron-LM, for scripts only: the modules are in packages.
    "megatron.core.parallel_state": set(),
    "megatron.core.process_groups_config": set(),
    "megatron.core.hyper_comm_grid": set(),
    "megatron.core.timers": set(),
    "megatron.core.rerun_state_machine": set(),
    "megatron.core.parallel.parallel_state": {
        "megatron/core/parallel/default_groups.py",  # groups that a caller leaves out
        "megatron/core/compat/pipeline.py",  # Megatron Core's helpers for scripts
        "megatron/core/compat/tensor_parallel.py",
        "megatron/core/compat/utils.py",
        # Exchange between stages: scripts with a forward pass of their own give no group.
        "megatron/core/inference/communication_utils.py",
        "megatron/training/initialize.py",  # installs and clears it
        "megatron/training/compat/utils.py",  # Megatron-LM's helpers for scripts
    },
    # Import paths of Megatron-LM, for scripts only: the modules are in compat/.
    "megatron.training.global_vars": set(),
    "megatron.training.utils": set(),
    "megatron.training.compat.global_vars": {
        "megatron/training/__init__.py",
        "megatron/training/global_vars.py",  # the import path of Megatron-LM
        "megatron/training/initialize.py",  # installs and clears it
        "megatron/training/training.py",  # installs a run in place of its context
        "megatron/training/compat/train_loop.py",  # get_model(), train_step() and others
        "megatron/training/compat/utils.py",
        "megatron/training/compat/checkpointing.py",  # Megatron-LM's save and load
    },
}

# Arithmetic and settings: they import no torch, so that tools start at once.
PURE = (
    "megatron/core/config/",
    "megatron/core/parallel/rank_grid.py",
    "megatron/core/optional.py",
    "megatron/core/pipeline_parallel/plan.py",
    "megatron/core/pipeline_parallel/communication_plan.py",
    "megatron/training/config/",
    # The front end, the text of its answers, its images, and the flags of tools.
    "megatron/inference/server/",
    "megatron/inference/text.py",
    "megatron/inference/image_prompts.py",
    "megatron/inference/engine_flags.py",
)


def package_of(module: str) -> str | None:
    """Package of a megatron.core module in the table; None for everything else."""
    parts = module.split(".")
    if parts[:2] != ["megatron", "core"] or len(parts) < 3:
        return None
    return parts[2] if parts[2] in MAY_IMPORT else "base"


def core_packages_keep_their_direction(source: Source) -> Iterator[str]:
    """A package of core imports only what the table gives it."""
    here = package_of(source.module)
    if here is None or source.path == "megatron/core/__init__.py":  # installs import paths
        return
    is_package = len(source.path.split("/")) > 3
    if is_package and here == "base":
        yield f"package {source.path.split('/')[2]} has no row in the table of directions"
        return
    for line, name in source.imports():
        there = package_of(name)
        if there and there != here and there not in MAY_IMPORT[here]:
            yield f"{line}: {here} must not import {name}"


def _training_layer(module: str) -> tuple[int, str] | None:
    """Row and package of a module below megatron.training; None for everything else."""
    parts = module.split(".")
    if parts[:2] != ["megatron", "training"] or len(parts) < 3:
        return None
    rows = [row for row, packages in enumerate(TRAINING_LAYERS) if parts[2] in packages]
    # What is no package is a file beside them, or one of their exports.
    return (rows[0], parts[2]) if rows else (_ENTRY_ROW, "entry")


def training_packages_keep_their_layers(source: Source) -> Iterator[str]:
    """A package of megatron/training imports packages of lower layers, for types too."""
    here = _training_layer(source.module)
    if here is None:
        return
    unit = source.module.split(".")[2]
    if unit in MEGATRON_PATHS:
        return
    if here[1] == "entry" and unit not in ENTRY:
        yield f"{unit} is in no layer: put it into a package, or the package into TRAINING_LAYERS"
    for line, name in source.imports():
        there = _training_layer(name)
        if there is not None and here[1] != there[1] and there[0] >= here[0]:
            yield f"{line}: {here[1]} must not import {name}, which is of no lower layer"


def imports_point_downwards(source: Source) -> Iterator[str]:
    """Core knows no application, training no post-training, megatron no scripts, nobody the tests.

    A string that names a module counts as an import.
    """
    forbidden = {"tests", "examples", "benchmarks"} - {source.path.split("/")[0]}
    if source.is_under("megatron"):
        forbidden |= {"tools", "pretrain_gpt", "pretrain_bert", "pretrain_t5", "pretrain_mamba"}
        forbidden |= {"unittest"}  # its mocks replace attributes of modules
    if source.path.startswith("megatron/core/"):
        forbidden |= {"megatron.training"}
    if source.path.startswith(("megatron/core/", "megatron/training/")):
        forbidden |= {"megatron.inference"}  # the server uses the engine and the tokenizers
    if source.path.startswith(BELOW_POST_TRAINING) and source.path not in PATHS_ABOVE:
        forbidden |= {"megatron.post_training"}
    if source.is_under("tests"):
        return
    for line, name in (*source.imports(), *_named_modules(source)):
        if any(name == top or name.startswith(f"{top}.") for top in forbidden):
            yield f"{line}: must not import {name}"


def _named_modules(source: Source) -> Iterator[tuple[int, str]]:
    """Yield line and text of strings that name a module of megatron, to import it later."""
    for node in source.nodes:
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if is_text and re.fullmatch(r"megatron(\.\w+)+(:\w+)?", node.value):
            yield node.lineno, node.value.partition(":")[0]


def only_the_compatibility_api_reads_global_state(source: Source) -> Iterator[str]:
    """The modules with global state are imported by the compatibility API, and by scripts."""
    if not source.is_under("megatron"):
        return
    for line, name in source.imports():
        for module, files in COMPATIBILITY_API.items():
            is_module = name == module or name.startswith(f"{module}.")
            is_inside = f"{source.module}.".startswith(f"{module}.")
            if is_module and source.path not in files and not is_inside:
                yield (
                    f"{line}: imports {module}, which only the compatibility API may import: take "
                    "process groups and the run as arguments"
                )


def pure_modules_import_no_torch(source: Source) -> Iterator[str]:
    """Settings and arithmetic start without torch."""
    if source.path.startswith(PURE):
        for line, name in source.imports():
            if name == "torch" or name.startswith("torch."):
                yield f"{line}: imports {name}"


def imports_stand_at_the_top(source: Source) -> Iterator[str]:
    """No import inside a function: a hidden edge of the import graph.

    Free are core/optional.py, a module's ``__getattr__``, ``main()`` of an entry point, and
    benchmarks, whose contenders each import only what they measure.
    """
    if source.is_under("tests", "benchmarks") or source.path == "megatron/core/optional.py":
        return
    is_entry_point = not source.is_under("megatron")
    for name, function in functions(source.tree):
        outermost = name.split(".")[0]
        if outermost == "__getattr__" or (is_entry_point and outermost == "main"):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.Import | ast.ImportFrom):
                yield f"{node.lineno}: import inside {name}"


def kernels_alone_import_triton(source: Source) -> Iterator[str]:
    """What imports triton is imported where a GPU wants it, by `fusions.kernels`, never before."""
    if source.is_under("tests") or source.path.startswith("megatron/core/fusions/triton/"):
        return
    for line, name in source.imports():
        if name.startswith(("triton", "megatron.core.fusions.triton")):
            yield f"{line}: imports {name}"


LAWS = [
    core_packages_keep_their_direction,
    training_packages_keep_their_layers,
    imports_point_downwards,
    only_the_compatibility_api_reads_global_state,
    pure_modules_import_no_torch,
    imports_stand_at_the_top,
    kernels_alone_import_triton,
]

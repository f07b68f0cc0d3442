"""Write docs/architecture.md: concepts, layers, and five walks through the code.

python tools/dev/architecture.py

A walk is a tree of functions, each with the calls that matter for the walk.  It is checked against
the syntax trees of the code: LookupError if a function does not make these calls in this order.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TARGET = ROOT / "docs/architecture.md"

HEAD = """# Architecture

How a run goes through the code. `tools/dev/architecture.py` writes this page from the code
(`make docs`) and fails if one of the calls below is not there any more; a test does the same.

- `megatron/core` is the library: typed, frozen configurations; process groups as arguments; no
  command line and no global state except what Megatron-LM's own API needs.
- `megatron/training` is the application: from a command line to a trained model.
- `megatron/post_training` is above it: fine-tuning, distillation, pruning, reinforcement learning.
  It registers its objectives with `training/models/registry.py`; training imports nothing of it.
- `megatron/inference` loads a checkpoint, generates, and serves: `server` is the HTTP front end;
  `megatron/core/inference` is the engine. `tools/lib/front_end_process.py` starts both.
- `pretrain_*.py` are the entry scripts: the model, the batch and the loss of one kind of model.

The concepts come first, then the layers, then the calls.

## Ranks and groups

Every process is a rank and runs the same program. The layout is the set of parallel sizes. Two
grids lie over the same ranks: dense layers divide them by tensor (`tp`), context (`cp`), data
(`dp`) and pipeline (`pp`) parallelism, expert layers by expert-tensor, expert (`ep`), expert-data
and pipeline parallelism. `RankGrid` computes with integers which ranks share an axis;
`create_process_groups` creates each group once, and `ProcessGroupCollection` holds them: `dp_cp`
is the group over two axes, `expt_` marks the grid of expert layers. A pipeline rank holds one or
more model chunks; each chunk is a stage of the pipeline. A layer gets the group that it needs as
an argument; only Megatron-LM's own API reads the groups of `parallel_state`. Ranks may also be
threads of one process (`--virtual-ranks`), which communicate through memory.

## A flag

A field of a configuration with `option()` is a flag (sections of the configuration use aliases such
as `_distributed = partial(option, group=...)`): the parser, the help text and Megatron-LM's
attribute names come from it. `resolve` turns the parsed values into a frozen `RunConfig`: it
derives values that were not given (`DERIVATIONS` of `derive.py`, in order) and evaluates all rules:
`RULES` of the configurations of `megatron.core`, which a project that constructs one meets too, and
of `arguments/rules`. A rule is a condition and its message. Errors of parsing end the program
first; all conflicts that rules find are then reported together. Only what needs the device is
checked later, in `connect`.

## A run

One object holds everything of a run, and functions get it as their argument `run`:

- `RunContext` is what exists before the model: the frozen configuration (`run.config`), the
  process groups (`run.groups`), the tokenizer, timers, and the counters that checkpoints save
  (`run.state`). `start()` returns it to programs that build a model of their own.
- `ModelRun` adds the model chunks of this rank, the forward step of the entry script, the data
  (`run.data`), the callbacks and the checkpoints (`run.checkpoints`): enough to evaluate.
- `TrainingRun` adds the optimizer and its scheduler. The loop, the step and the callbacks get it.

`pretrain()` parses the flags (`configure`), connects the ranks (`connect`), builds the run and
loads its checkpoint (`set_up`), trains (`train`) and evaluates.

## A step

`train_step` has five stages. `next_batch` gives the sizes of the global batch; the forward step
reads the data later (third walk). `forward_backward` runs the pipeline schedule over its
micro-batches; gradients add up in the buffers of the data-parallel wrapper. `reduce_gradients`
completes their reduction over data-parallel ranks (begun in the backward pass with overlap), sums
over tensor-parallel ranks and tied embeddings, divides by the tokens, and updates router biases
and the histories of fp8 scales. `update_parameters` lets the optimizer compute the norm, clip and
update; if the norm is not finite, parameters and learning rate stay, and the step still counts.
`complete_result` reduces the losses for the log. `train` calls each step through `run_step`,
which with `--rerun-mode` restores a snapshot and repeats a step whose result is rejected.
Everything else, from the log line to the checkpoint, is a callback.

## A save

A callback saves after a step (`CheckpointCallback`). Each rank lists the tensors that it holds as
records (`TensorRecord`): name, global shape, and pieces with offset and values. Of values that
several ranks hold, one rank writes each. Random states are saved per rank; counters, scheduler
and arguments once. Rank 0 creates a folder with a temporary name, every rank writes its files
into it, and rank 0 completes it with a manifest, renames it and replaces the tracker file, in
this order: a kill at any moment leaves a complete checkpoint to load (table in `commit.py`). With
`--async-save` the files are written in the background. A load asks for records by name and fills
them from the files of any layout.

## A request

The front end of the server, a process without torch, parses HTTP and checks fields; templates,
images and long texts run in helper processes with limits (`workers.py`). It sends the request to
the engine, another process: they exchange JSON lines over a socket (`engine_link.py`). Rank 0 of
the engine holds a scheduler for each replica (copy of the model) and pipeline lane. The scheduler
plans a step: which tokens of which requests the model sees, and in which pages of the cache their
keys and values lie. Rank 0 sends the plan to the ranks of that replica, which execute it
(`Engine.follow`); the rank that samples returns the tokens, and the scheduler records them. The
front end turns them into text.

## Layers

An arrow means "imports". A package imports only the packages that the lists in
`tests/repo/laws_of_imports.py` allow, for types too, and there is no import cycle; a test checks
both. Arrows that follow from others are left out.
"""
WALKS_HEAD = """
## Five walks

Each line is a function and its file. What is indented below a function is called by it, in this
order, directly or through functions of the same file.
"""


@dataclass(frozen=True)
class Stop:
    """Function, ``Class.method`` or class in a file, and the stops that it calls, in order.

    ``called`` is the name at the call if it differs from the function's own.
    """

    file: str
    name: str
    calls: tuple[Stop, ...] = ()
    called: str = ""

    @property
    def name_at_call(self) -> str:
        return self.called or self.name.rpartition(".")[2]


def _in(file: str, name: str, *calls: Stop, called: str = "") -> Stop:
    return Stop(file, name, calls, called)


_TRAINING, _CORE = "megatron/training", "megatron/core"
_ARGUMENTS = f"{_TRAINING}/arguments"
_LAYERS = (
    "core",
    "training",
    "inference",
    "post_training",
)  # whose packages the diagram has, lowest first
ARGV_TO_CONFIG = _in(
    f"{_TRAINING}/initialize.py",
    "configure",
    _in(
        f"{_ARGUMENTS}/parser.py",
        "parse_args",
        _in(f"{_ARGUMENTS}/config_file.py", "read_config_file"),
        _in(
            f"{_ARGUMENTS}/parser.py",
            "build_parser",
            _in(
                f"{_ARGUMENTS}/options.py",
                "add_options",
                _in(f"{_CORE}/config/option.py", "options_of"),
            ),
        ),
        _in(f"{_ARGUMENTS}/config_file.py", "set_defaults_from"),
        _in(f"{_ARGUMENTS}/parser.py", "apply_defaults"),
    ),
    _in(
        f"{_ARGUMENTS}/flat_values.py",
        "resolve_args",
        _in(
            f"{_ARGUMENTS}/resolve.py",
            "resolve",
            _in(f"{_ARGUMENTS}/resolve.py", "states"),
            _in(
                f"{_ARGUMENTS}/resolve.py",
                "assemble",
                _in(f"{_ARGUMENTS}/options.py", "read_config"),
                _in(f"{_TRAINING}/config/run.py", "RunConfig"),
            ),
            _in("megatron/core/config/rule.py", "problems_of"),
            _in(f"{_ARGUMENTS}/rules/rule.py", "warnings_of"),
        ),
    ),
)
ARGV_TO_STEP = _in(
    f"{_TRAINING}/training.py",
    "pretrain",
    _in(f"{_TRAINING}/initialize.py", "configure"),
    _in(f"{_TRAINING}/initialize.py", "connect"),
    _in(
        f"{_TRAINING}/training.py",
        "set_up",
        _in(
            f"{_TRAINING}/initialize.py",
            "install_groups",
            _in(
                f"{_TRAINING}/runtime/setup.py",
                "create_groups",
                _in(f"{_CORE}/parallel/process_groups_config.py", "create_process_groups"),
            ),
        ),
        _in(
            f"{_TRAINING}/initialize.py",
            "create_context",
            _in(
                f"{_TRAINING}/runtime/setup.py",
                "build_context",
                _in(f"{_TRAINING}/runtime/context.py", "RunContext"),
            ),
        ),
        _in(
            f"{_TRAINING}/runtime/setup.py",
            "build_model_chunks",
            _in(f"{_CORE}/params/param_init.py", "initialize_parameters"),
            _in(
                f"{_CORE}/distributed/distributed_data_parallel.py",
                "DistributedDataParallel",
            ),
        ),
        _in(
            f"{_TRAINING}/runtime/setup.py",
            "build_optimizer",
            _in(f"{_CORE}/optimizer/__init__.py", "get_megatron_optimizer"),
        ),
        _in(f"{_TRAINING}/step/run.py", "TrainingRun"),
        _in(f"{_TRAINING}/step/run.py", "ModelRun.load"),
        _in(f"{_TRAINING}/data/loaders.py", "build_data"),
        _in(f"{_TRAINING}/callbacks/default.py", "default_callbacks"),
    ),
    _in(
        f"{_TRAINING}/step/train_step.py",
        "train",
        _in(f"{_TRAINING}/step/rerun.py", "run_step"),
        _in(
            f"{_TRAINING}/step/train_step.py",
            "train_step",
            _in(
                f"{_TRAINING}/step/train_step.py",
                "forward_backward",
                _in(
                    f"{_CORE}/pipeline_parallel/schedules.py",
                    "forward_backward",
                    _in(f"{_CORE}/pipeline_parallel/executor.py", "Executor"),
                    called="get_forward_backward_func",
                ),
            ),
            _in(
                f"{_TRAINING}/step/train_step.py",
                "reduce_gradients",
                _in(f"{_CORE}/distributed/finalize_model_grads.py", "finalize_model_grads"),
            ),
            _in(
                f"{_TRAINING}/step/train_step.py",
                "update_parameters",
                _in(f"{_CORE}/optimizer/optimizer.py", "MegatronOptimizer.step"),
            ),
            _in(
                f"{_TRAINING}/step/step_result.py",
                "complete_result",
                _in(f"{_TRAINING}/runtime/context.py", "StepResult"),
            ),
        ),
        _in(f"{_TRAINING}/runtime/context.py", "TrainState.advance"),
        _in(f"{_TRAINING}/step/run.py", "Callback.on_step_end"),
    ),
)
_LAYER = _in(
    f"{_CORE}/transformer/transformer_layer.py",
    "TransformerLayer.forward",
    _in(
        f"{_CORE}/transformer/attention.py",
        "SelfAttentionBase.forward",
        _in(f"{_CORE}/transformer/attention.py", "SelfAttention.rotated"),
        _in(
            f"{_CORE}/transformer/dot_product_attention.py",
            "DotProductAttention.forward",
            called="core_attention",
        ),
        called="self_attention",
    ),
    _in(
        f"{_CORE}/transformer/mlp.py",
        "MLP.forward",
        _in(
            f"{_CORE}/tensor_parallel/layers.py",
            "ColumnParallelLinear.forward",
            called="linear_fc1",
        ),
        _in(f"{_CORE}/tensor_parallel/layers.py", "RowParallelLinear.forward", called="linear_fc2"),
        called="mlp",
    ),
    called="layers",
)
TOKENS_TO_LOSS = _in(
    "pretrain_gpt.py",
    "forward_step",
    _in(
        f"{_TRAINING}/data/batch.py",
        "next_batch",
        _in(f"{_TRAINING}/data/batch.py", "load_batch"),
        _in(f"{_CORE}/utils.py", "get_batch_on_this_cp_rank"),
    ),
    _in(
        f"{_TRAINING}/models/gpt.py",
        "apply_gpt",
        _in(
            f"{_CORE}/models/gpt/gpt_model.py",
            "GPTModel.forward",
            _in(
                f"{_CORE}/models/common/embeddings/language_model_embedding.py",
                "LanguageModelEmbedding.forward",
                called="embedding",
            ),
            _in(
                f"{_CORE}/transformer/transformer_block.py",
                "TransformerBlock.forward",
                _LAYER,
                called="decoder",
            ),
            _in(
                f"{_CORE}/models/common/language_module/language_module.py",
                "LanguageModule.token_losses",
                _in(
                    f"{_CORE}/tensor_parallel/fused_linear_cross_entropy.py",
                    "linear_cross_entropy",
                ),
            ),
            called="model",
        ),
        called="apply",
    ),
    _in("pretrain_gpt.py", "loss_func"),
)
PARAMETER_TO_CHECKPOINT = _in(
    f"{_TRAINING}/checkpointing/checkpointer.py",
    "Checkpointer.save",
    _in(
        f"{_TRAINING}/checkpointing/save.py",
        "save_run",
        _in(
            f"{_TRAINING}/checkpointing/save.py",
            "contents_of",
            _in(f"{_TRAINING}/checkpointing/checkpoint_tensors.py", "model_tensors"),
            _in(f"{_TRAINING}/checkpointing/checkpoint_tensors.py", "optimizer_tensors"),
        ),
        _in(
            f"{_CORE}/dist_checkpointing/all_ranks.py",
            "begin",
        ),
        _in(
            f"{_CORE}/dist_checkpointing/all_ranks.py",
            "finish",
            _in(f"{_CORE}/dist_checkpointing/all_ranks.py", "write"),
            _in(
                f"{_CORE}/dist_checkpointing/all_ranks.py",
                "complete",
                _in(f"{_CORE}/dist_checkpointing/commit.py", "publish"),
            ),
        ),
    ),
)
CHECKPOINT_TO_PARAMETER = _in(
    f"{_TRAINING}/checkpointing/checkpointer.py",
    "Checkpointer.load",
    _in(
        f"{_TRAINING}/checkpointing/load.py",
        "load_run",
        _in(
            f"{_CORE}/dist_checkpointing/all_ranks.py",
            "load",
        ),
        _in(f"{_TRAINING}/checkpointing/checkpoint_tensors.py", "set_rng_state"),
    ),
    _in(f"{_TRAINING}/runtime/context.py", "TrainState.load"),
)
_SERVER, _ENGINE = "megatron/inference/server", "megatron/core/inference/paged_engine"
READ_REQUEST = _in(f"{_SERVER}/openai_api.py", "CompletionRequest.read")
REQUEST_TO_ENGINE = _in(
    f"{_SERVER}/openai_api.py",
    "answer",
    _in(
        f"{_SERVER}/generation.py",
        "Service.samples",
        _in(f"{_SERVER}/generation.py", "Generation"),
    ),
)
ENGINE_TO_TOKENS = _in(
    f"{_SERVER}/engine_link.py",
    "EngineLoop.run",
    _in(
        f"{_ENGINE}/engine.py",
        "Engine.step",
        _in(f"{_ENGINE}/scheduler.py", "RequestScheduler.plan"),
        _in(f"{_ENGINE}/runner.py", "ModelRunner.execute"),
        _in(f"{_ENGINE}/scheduler.py", "RequestScheduler.record"),
    ),
    _in(f"{_SERVER}/engine_link.py", "encode"),
)
TOKENS_TO_CLIENT = [
    _in(f"{_SERVER}/engine_link.py", "EngineClient.read_until_the_end"),
    _in(
        f"{_SERVER}/generation.py",
        "Generation.deltas",
        _in(f"{_SERVER}/generation.py", "Sample.add"),
    ),
]
AFTER_STEP = _in(
    f"{_TRAINING}/callbacks/periodic.py",
    "CheckpointCallback.on_step_end",
    PARAMETER_TO_CHECKPOINT,
)
WALKS: Mapping[str, Sequence[Stop]] = {
    "From a flag to its value": [ARGV_TO_CONFIG],
    "From the command line to a step": [ARGV_TO_STEP],
    "From tokens to the loss": [TOKENS_TO_LOSS],
    "From a parameter to a checkpoint and back": [
        AFTER_STEP,
        CHECKPOINT_TO_PARAMETER,
    ],
    "From a request to its tokens and back": [
        READ_REQUEST,
        REQUEST_TO_ENGINE,
        ENGINE_TO_TOKENS,
        *TOKENS_TO_CLIENT,
    ],
}


def render() -> str:
    """Return the page.  Raises LookupError for a walk that the code does not follow."""
    lines = [HEAD, "```mermaid", "flowchart TD", *diagram(), "```", WALKS_HEAD]
    for title, roots in WALKS.items():
        lines += [f"### {title}", ""]
        for root in roots:
            check(root)
            lines += walk_lines(root)
        lines.append("")
    return "\n".join(lines)


def walk_lines(stop: Stop, depth: int = 0) -> Iterator[str]:
    """Yield ``stop`` and the stops that it calls, as a nested list."""
    text = first_sentence(ast.get_docstring(definition(stop.file, stop.name)) or "")
    yield f"{'   ' * depth}1. `{stop.file}` `{stop.name}`: {text}"
    for called in stop.calls:
        yield from walk_lines(called, depth + 1)


def first_sentence(text: str) -> str:
    """Return the text up to the first full stop that ends a sentence, without it."""
    joined = re.sub(r"\s+", " ", text.partition("\n\n")[0]).strip()
    return re.split(r"(?<=[\w)`*])[.](?:\s|$)", joined, maxsplit=1)[0]


def check(stop: Stop) -> None:
    """Raise LookupError unless ``stop`` and all stops below it make their calls in order."""
    made = calls_of(stop.file, stop.name)
    at = 0
    for called in stop.calls:
        name = called.name_at_call
        if name not in made[at:]:
            raise LookupError(f"{stop.file} {stop.name} does not call {name} at its place")
        at = made.index(name, at) + 1
        check(called)


_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def definition(file: str, name: str) -> ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef:
    """Return the function, method or class ``name`` of ``file``.  Raises LookupError."""
    found: ast.AST = tree_of(file)
    for part in name.split("."):
        body: list[ast.stmt] = getattr(found, "body", [])
        named = [n for n in body if isinstance(n, (*_FUNCTIONS, ast.ClassDef)) and n.name == part]
        if not named:
            raise LookupError(f"{file} has no {name}")
        found = named[-1]
    assert isinstance(found, (*_FUNCTIONS, ast.ClassDef))
    return found


@cache
def tree_of(file: str) -> ast.Module:
    return ast.parse((ROOT / file).read_text(encoding="utf-8"))


def calls_of(file: str, name: str, above: frozenset[str] = frozenset()) -> list[str]:
    """Return names that a function calls or passes, in order, through functions of its file."""
    function = definition(file, name)
    found = []
    for node in (node for statement in function.body for node in _in_order(statement)):
        if isinstance(node, ast.Name):
            called, homes = node.id, [f"{name}.{node.id}", node.id]
        else:
            called = node.attr
            is_own = isinstance(node.value, ast.Name) and node.value.id == "self"
            homes = [f"{cls}.{called}" for cls in classes_of(file, name)] if is_own else []
        found.append(called)
        for home in homes:
            if home != name and home not in above and is_defined(file, home):
                found += calls_of(file, home, above | {name})
                break
    return found


def classes_of(file: str, name: str) -> list[str]:
    """Return the class of the method ``name``, and its bases in the same file."""
    cls = name.partition(".")[0]
    if not is_defined(file, cls) or not isinstance(found := definition(file, cls), ast.ClassDef):
        return []
    plain = [base.value if isinstance(base, ast.Subscript) else base for base in found.bases]
    bases = [base.id for base in plain if isinstance(base, ast.Name)]
    return [cls, *(above for base in bases for above in classes_of(file, base))]


def is_defined(file: str, name: str) -> bool:
    """Return whether ``name`` is a function or class of ``file``."""
    try:
        definition(file, name)
    except LookupError:
        return False
    return True


def _in_order(node: ast.AST) -> Iterator[ast.Name | ast.Attribute]:
    """Yield names and attributes in source order, without those of inner functions."""
    if isinstance(node, _FUNCTIONS):
        return
    for child in ast.iter_child_nodes(node):
        yield from _in_order(child)
    if isinstance(node, ast.Name | ast.Attribute):
        yield node


def diagram() -> Iterator[str]:
    """Yield packages and the imports between them as lines of a Mermaid flow chart."""
    imported = package_imports()
    rows: dict[str, list[str]] = {f"megatron/{name}": [] for name in reversed(_LAYERS)}
    for package in imported:
        rows["megatron/" + package.split(".")[0]].append(package)
    for title, packages in rows.items():
        yield f"  subgraph {title}"
        yield from (f"    {p.replace('.', '_')}[{p.partition('.')[2]}]" for p in sorted(packages))
        yield "  end"
    for package in sorted(imported):
        others = imported[package]
        follows = {far for near in others for far in _reached(near, imported)}
        for other in sorted(others - follows):
            yield f"  {package.replace('.', '_')} --> {other.replace('.', '_')}"


def _reached(package: str, imported: Mapping[str, set[str]]) -> set[str]:
    """Return every package that ``package`` imports, directly or through others."""
    found: set[str] = set()
    todo = [*imported[package]]
    while todo:
        here = todo.pop()
        if here not in found:
            found.add(here)
            todo += imported[here]
    return found


def package_imports() -> dict[str, set[str]]:
    """Return package -> packages that it imports, such as ``core.optimizer``."""
    found: dict[str, set[str]] = {}
    for file in sorted((ROOT / "megatron").rglob("*.py")):
        here = _package(".".join(file.relative_to(ROOT).with_suffix("").parts))
        if here is None or here == "training.datasets":  # only an import path of Megatron-LM
            continue
        others = found.setdefault(here, set())
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                for name in (node.module, *(f"{node.module}.{a.name}" for a in node.names)):
                    there = _package(name + ".x")
                    if there is not None and there != here:
                        others.add(there)
    return {here: others & found.keys() for here, others in found.items()}


def _package(module: str) -> str | None:
    parts = module.split(".")
    if parts[0] != "megatron" or parts[1] not in _LAYERS or len(parts) < 4:
        return None
    return f"{parts[1]}.{parts[2]}" if (ROOT / "/".join(parts[:3])).is_dir() else None


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    TARGET.write_text(render(), encoding="utf-8")

"""Run public projects that build on Megatron Core, with this checkout as their Megatron.

    python tools/dev/library_projects.py
    python tools/dev/library_projects.py mbridge verl --models llama qwen3 --layouts 1x1

For each project: make an environment, install the pinned release from PyPI, import its modules
that import megatron, and run its check on tiny models that are made on the spot.  A check builds
the model, loads it through the project, compares it with transformers, trains, saves, loads and
exports.  ``--layouts`` are TPxPP; 2x2 runs four processes over gloo.

The files of a project stay as they are.  Without a GPU, `tools/dev/lib/emulated_cuda.py` answers
its calls of torch.cuda.  Needs pip and its package index, and no other network.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import venv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TORCH = "torch==2.13.0"
STEP = "step done: "  # as in tools/dev/lib/library_steps.py
_LIMIT_S = 900.0
_DENSE = ("llama", "qwen2", "qwen3")


@dataclass(frozen=True)
class Project:
    """A project: its release, what it needs, and the models of its check."""

    package: str  # that it installs
    release: str
    needs: tuple[str, ...]  # installed with their dependencies
    models: tuple[str, ...]
    check: str  # module below tools.dev.lib
    with_dependencies: bool = False  # of the release itself; they may need a GPU to install
    variables: Mapping[str, str] = field(default_factory=dict)  # environment of its processes


PROJECTS = {
    "mbridge": Project(
        package="mbridge",
        release="mbridge==0.15.1",
        needs=("transformers==4.57.6", "safetensors==0.8.0", "einops==0.8.2", "triton"),
        models=(*_DENSE, "qwen3_moe", "deepseek_v3"),
        check="library_mbridge",
    ),
    "verl": Project(
        package="verl",
        release="verl==0.9.1",
        needs=("mbridge==0.15.1", "transformers==5.10.4", "safetensors==0.8.0", "einops==0.8.2"),
        models=(*_DENSE, "qwen3_moe"),
        check="library_verl",
        with_dependencies=True,
        variables={
            "VERL_USE_EXTERNAL_MODULES": "tools.dev.lib.emulated_verl",
            "VERL_PLATFORM": "emulated",
        },
    ),
    "megatron-bridge": Project(
        package="megatron.bridge",
        release="megatron-bridge==0.3.1",
        needs=(
            "transformers==4.57.6",
            "accelerate",
            "datasets",
            "einops",
            "hydra-core==1.3.2",
            "omegaconf",
            "rich",
            "sentencepiece",
            "six",
            "tensorboard",
            "wandb",
        ),
        models=(*_DENSE, "qwen3_moe", "deepseek_v3"),
        check="library_megatron_bridge",
    ),
    "mcore-bridge": Project(
        package="mcore_bridge",
        release="mcore-bridge==1.6.5",
        needs=("ms-swift==4.6.0", "einops", "triton"),
        models=(*_DENSE, "qwen3_moe"),
        check="library_mcore_bridge",
    ),
}


@dataclass(frozen=True)
class Row:
    """One run of a check: the steps that it has done, and why it ended before the last."""

    project: str
    model: str
    layout: str
    steps: tuple[str, ...]
    error: str


def main(argv: Sequence[str] | None = None) -> int:
    """Make the environments, run the checks, and print the table; 1 if a check failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("projects", nargs="*", choices=[*PROJECTS, []], help="default: all")
    parser.add_argument("--models", nargs="*", help="of the check; default: all of the project")
    parser.add_argument("--layouts", nargs="*", default=["1x1", "2x2"], help="TPxPP")
    parser.add_argument("--environments", type=Path, default=ROOT / "build/library_projects")
    parser.add_argument("--imports-only", action="store_true", help="run no check")
    options = parser.parse_args(argv)
    rows = []
    for name in options.projects or PROJECTS:
        project, home = PROJECTS[name], options.environments / name
        python = environment(project, home)
        print(f"== {name}: {project.release}", flush=True)
        print(
            output_of(
                [python, "-m", "tools.dev.lib.library_imports", project.package], project.variables
            )
        )
        if options.imports_only:
            continue
        models = [m for m in project.models if m in (options.models or project.models)]
        output_of([python, "-m", "tools.dev.lib.library_models", str(home / "models"), *models])
        for layout in options.layouts:
            for model in models:
                rows.append(run_check(name, python, model, layout, home))
                print(line_of(rows[-1]), flush=True)
    print("\n| project | model | TPxPP | steps done | ended by |\n|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row.project} | {row.model} | {row.layout} | {', '.join(row.steps)} | {row.error} |"
        )
    return int(any(row.error for row in rows))


def environment(project: Project, home: Path) -> str:
    """Return the Python of the project's environment; make it if it is not there."""
    python, mark = home / "env/bin/python", home / "installed"
    wanted = json.dumps([TORCH, project.needs, project.release, project.with_dependencies])
    if mark.exists() and mark.read_text() == wanted:
        return str(python)
    venv.create(home / "env", with_pip=True, clear=True)
    install = [str(python), "-m", "pip", "install", "--quiet"]
    output_of([*install, TORCH, "numpy", *project.needs])
    alone = [] if project.with_dependencies else ["--no-deps"]
    output_of([*install, *alone, project.release])
    mark.write_text(wanted)
    return str(python)


def run_check(name: str, python: str, model: str, layout: str, home: Path) -> Row:
    """Run the check of a project for one model, in as many processes as the layout has."""
    tp, pp = map(int, layout.split("x"))
    launcher = [python]
    if tp * pp > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone"]
        launcher += ["--nproc-per-node", str(tp * pp)]
    module = f"tools.dev.lib.{PROJECTS[name].check}"
    command = [*launcher, "-m", module, model, str(home / "models"), str(tp), str(pp)]
    log = home / f"{model}_{layout}.log"
    with log.open("w") as file:
        code = subprocess.run(
            command,
            cwd=home,
            env=variables(),
            stdout=file,
            stderr=subprocess.STDOUT,
            timeout=_LIMIT_S,
        ).returncode
    lines = log.read_text().splitlines()
    steps = tuple(described(json.loads(line.partition(STEP)[2])) for line in lines if STEP in line)
    return Row(name, model, layout, steps, error_of(lines) if code else "")


def described(step: dict[str, object]) -> str:
    """Return a step and its numbers in words."""
    numbers = [f"{k} {v:.3g}" for k, v in step.items() if isinstance(v, float)]
    return f"{step['step']}{f' ({chr(44).join(numbers)})' if numbers else ''}"


def error_of(lines: Sequence[str]) -> str:
    """Return the first line of the output that names an exception."""
    named = (line.partition("]: ")[2] or line for line in lines)
    found = (line for line in named if line[:1].isalpha() and "Error: " in line)
    return next(found, "exit without an exception").replace("|", "/")[:200]


def line_of(row: Row) -> str:
    """Return a row as a line of progress."""
    return f"{row.model} {row.layout}: {', '.join(row.steps)}{row.error and ': ' + row.error}"


def variables() -> dict[str, str]:
    """Return the environment variables of a child: this checkout is its megatron."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}


def output_of(command: Sequence[str], more: Mapping[str, str] | None = None) -> str:
    """Run a command, and return what it prints; its errors are shown."""
    environ = {**variables(), **(more or {})}
    done = subprocess.run(command, env=environ, text=True, stdout=subprocess.PIPE, check=True)
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())

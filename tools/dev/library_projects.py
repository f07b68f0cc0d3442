"""Run public projects that build on Megatron Core, with this checkout as their Megatron.

    python tools/dev/library_projects.py
    python tools/dev/library_projects.py mbridge verl --models llama qwen3 --layouts 1x1

For each project: make an environment, install the pinned release from PyPI, import its modules
that import megatron, and run its check on tiny models that are made on the spot.  A check builds
the model, loads it through the project, compares it with transformers, trains, saves, loads and
exports.  ``--layouts`` are TPxPP; 2x2 runs four processes over gloo.  All of it takes a quarter of
an hour on two cores; a table for each project says what was done.

The files of a project stay as they are.  Without a GPU, `tools/dev/lib/emulated_cuda.py` answers
its calls of torch.cuda.  Needs pip and its package index, and no other network; wheels that are in
the folder ``--packages`` are installed from there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import venv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TORCH = "torch==2.13.0"
STEP = "step done: "  # as in tools/dev/lib/library_steps.py
IMPORTS = "imports: "  # as in tools/dev/lib/library_imports.py
# What a check does, in the columns of the table; other steps come after them.
COLUMNS = ("build", "load", "export", "logits", "step", "save", "resume", "write")
LOG = "log"  # of the command that runs, in the folder of the project
_LIMIT_S = 900.0
_DENSE = ("llama", "qwen2", "qwen3")


@dataclass(frozen=True)
class Project:
    """A project: its release, what it needs, and the models of its check."""

    package: str  # that it installs
    release: str
    needs: tuple[str, ...]  # installed with their dependencies
    models: tuple[str, ...]
    check: str = "library_bridges"  # module below tools.dev.lib
    with_dependencies: bool = False  # of the release itself; they may need a GPU to install
    variables: Mapping[str, str] = field(default_factory=dict)  # environment of its processes


PROJECTS = {
    "mbridge": Project(
        package="mbridge",
        release="mbridge==0.15.1",
        needs=("transformers==4.57.6", "safetensors==0.8.0", "einops==0.8.2", "triton"),
        models=(*_DENSE, "qwen3_moe", "deepseek_v3"),
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
        models=(*_DENSE, "qwen3_moe", "deepseek_v3_grouped"),
    ),
    "mcore-bridge": Project(
        package="mcore_bridge",
        release="mcore-bridge==1.6.5",
        needs=("ms-swift==4.6.0", "einops", "triton"),
        models=(*_DENSE, "qwen3_moe"),
    ),
}


@dataclass(frozen=True)
class Row:
    """One run of a check: the steps that it has done, and why it ended before the last."""

    model: str
    layout: str
    steps: dict[str, str]  # name -> its number, or "yes"
    error: str
    seconds: float

    def __str__(self) -> str:
        """Return the row of the table."""
        further = [name for name in self.steps if name not in COLUMNS]
        cells = [self.model, self.layout, *(self.steps.get(name, "") for name in COLUMNS)]
        cells += [", ".join(further), self.error.replace("|", "/"), f"{self.seconds:.0f}"]
        return f"| {' | '.join(cells)} |"


def main(argv: Sequence[str] | None = None) -> int:
    """Make the environments, run the checks, and print the tables; 1 if a check failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("projects", nargs="*", choices=[*PROJECTS, []], help="default: all")
    parser.add_argument("--models", nargs="*", help="of the check; default: all of the project")
    parser.add_argument("--layouts", nargs="*", default=["1x1", "2x2"], help="TPxPP")
    parser.add_argument("--environments", type=Path, default=ROOT / "build/library_projects")
    parser.add_argument("--packages", type=Path, help="folder of wheels, used before the index")
    parser.add_argument("--imports-only", action="store_true", help="run no check")
    options = parser.parse_args(argv)
    errors = 0
    for name in options.projects or PROJECTS:
        project, home = PROJECTS[name], (options.environments / name).resolve()
        try:
            python = environment(project, home, options.packages)
            imports = [python, "-m", "tools.dev.lib.library_imports", project.package]
            lines = run(imports, project, home).splitlines()
            models = [m for m in project.models if m in (options.models or project.models)]
            make = [python, "-m", "tools.dev.lib.library_models", str(home / "models"), *models]
            run(make, project, home)
        except subprocess.SubprocessError as error:
            errors += 1
            print(f"## {project.release}: {error}; see {home / LOG}\n", flush=True)
            continue
        found = [line.partition(IMPORTS)[2] for line in lines if IMPORTS in line]
        print(f"## {project.release}: {chr(10).join(found)}\n", flush=True)
        if options.imports_only:
            continue
        columns = ["model", "TPxPP", *COLUMNS, "further steps", "ended by", "seconds"]
        print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)
        for layout in options.layouts:
            for model in models:
                row = run_check(project, python, model, layout, home)
                errors += bool(row.error)
                print(row, flush=True)
        print(flush=True)
    return int(errors > 0)


def environment(project: Project, home: Path, packages: Path | None) -> str:
    """Return the Python of the project's environment; make it if it is not there."""
    python, mark = home / "env/bin/python", home / "installed"
    wanted = json.dumps([TORCH, project.needs, project.release, project.with_dependencies])
    if mark.exists() and mark.read_text() == wanted:
        return str(python)
    home.mkdir(parents=True, exist_ok=True)
    venv.create(home / "env", with_pip=True, clear=True)
    install = [str(python), "-m", "pip", "install", "-qq"]
    if packages:
        install += ["--find-links", str(packages.resolve())]
    run([*install, TORCH, "numpy", *project.needs], project, home)
    alone = [] if project.with_dependencies else ["--no-deps"]
    run([*install, *alone, project.release], project, home)
    mark.write_text(wanted)
    return str(python)


def run_check(project: Project, python: str, model: str, layout: str, home: Path) -> Row:
    """Run the check of a project for one model, in as many processes as the layout has."""
    tp, pp = layout.split("x")
    ranks = int(tp) * int(pp)
    launcher = [python]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    check = ["-m", f"tools.dev.lib.{project.check}", project.package, model, str(home / "models")]
    start, error = time.monotonic(), ""
    try:
        run([*launcher, *check, tp, pp], project, home)
    except subprocess.SubprocessError as failure:
        error = str(failure)
    lines = (home / LOG).read_text().splitlines()
    (home / LOG).rename(home / f"{model}_{layout}.log")
    steps = [json.loads(line.partition(STEP)[2]) for line in lines if STEP in line]
    error = error and next((e for e in map(exception_of, lines) if e), error)
    numbers = {step["step"]: number_of(step) for step in steps}
    return Row(model, layout, numbers, error, time.monotonic() - start)


def number_of(step: Mapping[str, Any]) -> str:
    """Return the number of a step for the table: its error, or its loss."""
    number = step.get("error", step.get("loss"))
    return "yes" if number is None else f"{number:.2g}"


def exception_of(line: str) -> str:
    """Return the exception that a line of the output names, without the rank before it."""
    text = line.partition("]: ")[2] or line
    return text[:200] if text[:1].isalpha() and "Error: " in text else ""


def run(command: Sequence[str], project: Project, home: Path) -> str:
    """Run a command of a project and return what it prints, which is in a log too.

    Processes that it leaves are ended: they would hold the streams of this program.
    """
    own = {"PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
    environ = {**os.environ, **own, "HF_HUB_OFFLINE": "1", **project.variables}
    log = home / LOG
    with log.open("w") as file:
        process = subprocess.Popen(
            command,
            cwd=home,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(_LIMIT_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if code:
        raise subprocess.CalledProcessError(code, command)
    return log.read_text()


if __name__ == "__main__":
    sys.exit(main())

"""Run a functional-test recipe: a YAML file with ENV_VARS, MODEL_ARGS and TEST_TYPE.

    python tools/dev/run_recipe.py model_config.yaml --dry-run
    python tools/dev/run_recipe.py model_config.yaml --check
    python tools/dev/run_recipe.py model_config.yaml --scale-down

A recipe is a command line written as YAML.  ``--scale-down`` keeps every flag but reduces sizes,
lengths, degrees and iterations so that this machine runs it on mock data in about a minute.
docs/test_recipes.md describes what each TEST_TYPE runs and compares.

A recipe is trusted like a script: its BEFORE_SCRIPT and AFTER_SCRIPT are run by bash.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from math import lcm
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # installed or not

from megatron.core.config.errors import ConfigError, MegatronError
from tools.dev.lib.recipe_file import Recipe, load
from tools.dev.lib.recipe_results import compare_with_golden, read_metrics, report
from tools.dev.lib.recipe_scale import scale_down, smallest_world

ROOT = Path(__file__).resolve().parents[2]
TRACKER = "latest_checkpointed_iteration.txt"


@dataclass(frozen=True)
class Plan:
    """Command lines of the first and the second run, and their output folder."""

    recipe: Recipe
    first: list[str]
    second: list[str]
    environment: dict[str, str]
    out: Path

    def path_of(self, flag: str) -> Path | None:
        words = self.first
        return Path(words[words.index(flag) + 1]) if flag in words else None


def main(argv: list[str] | None = None) -> int:
    """Run, check or print the commands of a recipe; return the exit code."""
    options = _parser().parse_args(argv)
    try:
        recipe = load(options.recipe, options.script)
        recipe.golden = None if options.scale_down else options.golden or recipe.golden
        out = (options.out or Path(tempfile.mkdtemp(prefix="recipe-"))).resolve()
        plan = plan_of(recipe, out, options)
    except MegatronError as error:
        print(f"run_recipe: {error}", file=sys.stderr)
        return 2
    _print_plan(plan)
    if options.dry_run:
        return 0
    out.mkdir(parents=True, exist_ok=True)
    if options.check:
        return _shown(plan.first, _environment(plan), out / "check.log")
    try:
        return _repeat(plan, is_small=options.scale_down)
    except MegatronError as error:
        print(f"run_recipe: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe", type=Path, help="the YAML file")
    parser.add_argument("--scale-down", action="store_true", help="tiny, on mock data, a minute")
    parser.add_argument("--dry-run", action="store_true", help="print the commands and stop")
    parser.add_argument(
        "--check", action="store_true", help="let the program check the flags (--check-only)"
    )
    parser.add_argument("--script", help="entry script; otherwise the recipe's")
    parser.add_argument("--world-size", type=int, help="ranks; otherwise as few as its degrees ask")
    parser.add_argument("--nproc-per-node", type=int, help="ranks on this machine; default all")
    parser.add_argument("--out", type=Path, help="logs and checkpoints; else a new folder in /tmp")
    parser.add_argument(
        "--golden", type=Path, help="golden values; otherwise the file beside the recipe"
    )
    return parser


def plan_of(recipe: Recipe, out: Path, options: argparse.Namespace) -> Plan:
    """Return the commands of both runs.  Raises ConfigError for unset variables."""
    both = [recipe.args, recipe.args if recipe.args_2 is None else recipe.args_2]
    if options.scale_down:
        both = [scale_down(args, out) for args in both]
        recipe.args = both[0]
    folders = {"CHECKPOINT_SAVE_PATH": "checkpoints", "TENSORBOARD_PATH": "tensorboard"}
    folders |= {"DATA_CACHE_PATH": "cache", "OUTPUT_PATH": "."}
    if recipe.test_type != "frozen-resume":
        folders["CHECKPOINT_LOAD_PATH"] = "checkpoints"
    variables = {name: str(out / folder) for name, folder in folders.items()}
    if options.check or options.scale_down:  # no data is read: any path works
        names = re.findall(r"\$\{?(\w+)", str(both))
        variables = {name: str(out / name) for name in names} | variables
    environment = {**variables, **os.environ, **recipe.env}
    world_size = options.world_size or lcm(*(smallest_world(args) for args in both))
    is_alone = options.check
    first, second = (
        [
            *launcher(recipe.script, 1 if is_alone else world_size, options.nproc_per_node),
            *words_of(args, environment),
        ]
        for args in both
    )
    if options.check:
        first += ["--check-only", "--check-world-size", str(world_size)]
    return Plan(recipe, first, second, environment, out)


def launcher(script: str, world_size: int, nproc_per_node: int | None = None) -> list[str]:
    """Return the words before the flags; a single rank needs no launcher."""
    words = [sys.executable]
    if world_size > 1:
        words += ["-m", "torch.distributed.run", "--nproc-per-node"]
        words += [str(nproc_per_node or world_size)]
        nodes = world_size // (nproc_per_node or world_size)
        words += ["--nnodes", str(nodes)] if nodes > 1 else ["--standalone"]
    return [*words, str(ROOT / script)]


def _print_plan(plan: Plan) -> None:
    recipe = plan.recipe
    variables = " ".join(f"{k}={shlex.quote(v)}" for k, v in recipe.env.items())
    runs = [plan.first]
    if recipe.test_type == "ckpt-resume" and plan.second != plan.first:
        runs.append(plan.second)
    for words in runs:
        for text in (recipe.before, f"{variables} {shlex.join(words)}".strip(), recipe.after):
            if text:
                print(text.rstrip("\n"), flush=True)


def words_of(args: Mapping[str, Any], env: Mapping[str, str]) -> list[str]:
    """Return MODEL_ARGS as words of a command line.

    true is a flag without value, false omits the flag, a list gives several words.
    """
    words: list[str] = []
    missing: set[str] = set()
    for flag, value in args.items():
        if value in ("false", "False"):
            continue
        words.append(flag)
        if value in ("true", "True", ""):
            continue
        for item in value if isinstance(value, list) else [str(value)]:
            text = _without_brackets(_expanded(str(item), env, missing))
            try:
                words += shlex.split(text) if _has_several_words(text) else [text]
            except ValueError as error:  # a quote that does not end
                raise ConfigError(f"the recipe's {flag} {text}: {error}") from None
    if missing:
        names = ", ".join(sorted(missing))
        raise ConfigError(f"the recipe refers to {names}, unset here: export it, or --scale-down")
    return words


def _has_several_words(text: str) -> bool:
    """Return whether a value is several words, as blends are; brackets are one word."""
    return " " in text and text[0] not in "[({"


def _without_brackets(text: str) -> str:
    """Return ``a b`` for the list ``[a b]``; leave expressions such as ``[0]*2+[1]`` unchanged."""
    match = re.fullmatch(r"\[\s*([^\[\]()*+,]+?)\s*\]", text)
    return match[1] if match and not match[1].isdecimal() else text


def _expanded(text: str, env: Mapping[str, str], missing: set[str]) -> str:
    def look_up(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        value = env.get(name, os.environ.get(name))
        if value is None:
            missing.add(name)
        return value or ""

    return re.sub(r"\$(?:\{(\w+)\}|(\w+))", look_up, text)


def _repeat(plan: Plan, is_small: bool) -> int:
    """Run the recipe N_REPEAT times, each from an empty checkpoint folder."""
    recipe, save = plan.recipe, plan.path_of("--save")
    if recipe.num_repeats > 1 and save is not None and plan.out not in save.parents:
        raise ConfigError(
            f"N_REPEAT {recipe.num_repeats} empties --save {save} between runs, which --out does "
            "not hold: leave CHECKPOINT_SAVE_PATH unset"
        )
    for number in range(1, recipe.num_repeats + 1):
        if number > 1 and save is not None:
            shutil.rmtree(save, ignore_errors=True)
        suffix = "" if number == 1 else f"-{number}"
        code = _run_type(plan, suffix, is_small)
        if code:
            return code
    return 0


def _run_type(plan: Plan, suffix: str, is_small: bool) -> int:
    """Run as TEST_TYPE requires, and compare; return the exit code."""
    recipe, name = plan.recipe, f"run{suffix}"
    # A full-size checkpoint does not fit the scaled-down model, which saves its own first.
    is_resumed = recipe.test_type == "ckpt-resume" or (
        recipe.test_type == "frozen-resume" and is_small
    )
    if recipe.test_type == "frozen-resume" and not is_small:
        load = plan.path_of("--load")
        if load is None or not (load / TRACKER).exists():
            raise ConfigError(
                f"TEST_TYPE frozen-resume continues from a checkpoint, and --load {load} holds "
                "none: let CHECKPOINT_LOAD_PATH name the folder that an earlier run has left"
            )
    code = _run(plan, plan.first, name)
    if code == 0 and recipe.test_type == "release":
        code = _run_to_the_end(plan, name)
    if code == 0 and is_resumed:
        code = _resume(plan, suffix)
    if code == 0 and recipe.is_compared:
        code = compare_with_golden(recipe.golden, plan.out / f"{name}.jsonl", recipe.metrics)
    return code


def _run_to_the_end(plan: Plan, name: str) -> int:
    """Restart from the last checkpoint until all steps are done, as a sequence of jobs does."""
    save, steps = plan.path_of("--save"), plan.recipe.number("--train-iters", 0)
    done = _saved_iteration(save)
    while save is not None and 0 < done < steps:
        words = plan.first if "--load" in plan.first else [*plan.first, "--load", str(save)]
        code = _run(plan, words, name)
        if code:
            return code
        before, done = done, _saved_iteration(save)
        if done <= before:
            print(f"run_recipe: no step was saved after {done} of {steps}", file=sys.stderr)
            return 1
    return 0


def _saved_iteration(save: Path | None) -> int:
    """Return the iteration in the tracker file of ``save``; 0 without one."""
    tracker = None if save is None else save / TRACKER
    text = tracker.read_text().strip() if tracker is not None and tracker.exists() else ""
    return int(text) if text.isdecimal() else 0


def _resume(plan: Plan, suffix: str) -> int:
    """Run again from the first checkpoint, and compare the losses of both runs.

    With the same flags they are bitwise identical; another layout sums in another order.
    """
    save = plan.path_of("--save")
    if save is None or "--save-interval" not in plan.recipe.args:
        raise ConfigError(f"TEST_TYPE {plan.recipe.test_type} needs --save and --save-interval")
    (save / TRACKER).write_text(f"{plan.recipe.number('--save-interval', 0)}\n")
    words = plan.second if "--load" in plan.second else [*plan.second, "--load", str(save)]
    code = _run(plan, words, f"resumed{suffix}")
    if code:
        return code
    if plan.recipe.args_2 is not None:
        first, second = (plan.out / f"{name}{suffix}.jsonl" for name in ("run", "resumed"))
        return report(first, read_metrics(first), second, plan.recipe.metrics)
    compare = [sys.executable, str(ROOT / "tools/dev/loss_compare.py"), "--common"]
    logs = [str(plan.out / f"{name}{suffix}.log") for name in ("run", "resumed")]
    return _shown([*compare, *logs], plan.environment, plan.out / f"compare{suffix}.log")


def _run(plan: Plan, words: list[str], name: str) -> int:
    """Run ``words`` between BEFORE_SCRIPT and AFTER_SCRIPT; write NAME.log and NAME.jsonl."""
    environment = _environment(plan)
    metrics = str(plan.out / f"{name}.jsonl")
    recorded = [] if "--metrics-file" in words else ["--metrics-file", metrics]
    steps = {
        "before": ["bash", "-e", "-c", plan.recipe.before] if plan.recipe.before else [],
        name: [*words, *recorded],
        "after": ["bash", "-e", "-c", plan.recipe.after] if plan.recipe.after else [],
    }
    for step, command in steps.items():
        code = _shown(command, environment, plan.out / f"{step}.log") if command else 0
        if code:
            return code
    return 0


def _environment(plan: Plan) -> dict[str, str]:
    paths = [str(ROOT), *filter(None, [plan.environment.get("PYTHONPATH")])]
    return {**plan.environment, "PYTHONPATH": os.pathsep.join(paths)}


def _shown(words: list[str], environment: Mapping[str, str], log: Path) -> int:
    """Run ``words``; print the output and write it to ``log``; return the exit code."""
    with log.open("w") as kept:
        process = subprocess.Popen(
            words, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for line in process.stdout or ():
            print(line, end="", flush=True)
            kept.write(line)
    return process.wait()


if __name__ == "__main__":
    raise SystemExit(main())

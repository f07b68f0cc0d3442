"""Run a functional-test recipe: a YAML file with ENV_VARS, MODEL_ARGS and TEST_TYPE.

    python tools/run_recipe.py model_config.yaml --dry-run
    python tools/run_recipe.py model_config.yaml --scale-down

A recipe is a command line in another spelling.  ``--scale-down`` keeps every flag but makes
sizes, lengths, degrees and iterations so small that this machine runs it in about a minute, on
mock data.  TEST_TYPE regular runs once; ckpt-resume runs again from the middle checkpoint and
wants the same losses, bit for bit.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # installed or not

from megatron.core.config.errors import ConfigError, DataError, MegatronError
from megatron.core.optional import require
from tools.recipe_scale import scale_down, smallest_world

ROOT = Path(__file__).resolve().parent.parent
TEST_TYPES = ("regular", "ckpt-resume")
TRACKER = "latest_checkpointed_iteration.txt"

# A word of the recipe's path -> entry script; the first that fits, else GPT.
SCRIPTS = {
    "bert": "pretrain_bert.py",
    "t5": "pretrain_t5.py",
    "mamba": "pretrain_mamba.py",
    "hybrid": "pretrain_mamba.py",
    "multimodal": "pretrain_vlm.py",
    "retro": "pretrain_retro.py",
}


@dataclass
class Recipe:
    """What is run: flags in file order with their raw values, and the environment."""

    args: dict[str, Any]
    env: dict[str, str] = field(default_factory=dict)
    test_type: str = "regular"
    script: str = "pretrain_gpt.py"

    def number(self, flag: str, default: int) -> int:
        return int(self.args.get(flag, default))


def main(argv: list[str] | None = None) -> int:
    """Run, or print, the commands of a recipe; the exit code."""
    options = _parser().parse_args(argv)
    try:
        recipe = load(options.recipe, options.script)
        out = (options.out or Path(tempfile.mkdtemp(prefix="recipe-"))).resolve()
        if options.scale_down:
            recipe.args = scale_down(recipe.args, out)
        world_size = options.world_size or smallest_world(recipe.args)
        commands = [command(recipe, world_size, options.nproc_per_node)]
    except MegatronError as error:
        print(f"run_recipe: {error}", file=sys.stderr)
        return 2
    for words in commands:
        print(" ".join([*(f"{k}={shlex.quote(v)}" for k, v in recipe.env.items())]), end=" ")
        print(shlex.join(words), flush=True)
    if options.dry_run:
        return 0
    out.mkdir(parents=True, exist_ok=True)
    if recipe.test_type == "ckpt-resume":
        return _run_and_resume(recipe, commands[0], out)
    return _run(recipe, commands[0], out / "run.log")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe", type=Path, help="the YAML file")
    parser.add_argument("--scale-down", action="store_true", help="tiny, on mock data, a minute")
    parser.add_argument("--dry-run", action="store_true", help="print the command and stop")
    parser.add_argument("--script", help="entry script; otherwise told from the recipe's path")
    parser.add_argument("--world-size", type=int, help="ranks; otherwise as few as its degrees ask")
    parser.add_argument("--nproc-per-node", type=int, help="ranks on this machine; default all")
    parser.add_argument("--out", type=Path, help="logs and checkpoints; else a new folder in /tmp")
    return parser


def load(path: Path, script: str | None = None) -> Recipe:
    """The recipe in ``path``, every reference to the environment still in it."""
    content = read_recipe(path)
    args = content.get("MODEL_ARGS")
    if not isinstance(args, dict):
        raise ConfigError(f"{path}: no MODEL_ARGS, so there is nothing to run")
    strange = [flag for flag in args if not flag.startswith("-")]
    if strange:
        raise ConfigError(f"{path}: MODEL_ARGS {strange[0]} is no flag: it starts with no dash")
    test_type = content.get("TEST_TYPE") or "regular"
    if test_type not in TEST_TYPES:
        raise ConfigError(f"{path}: TEST_TYPE {test_type} is not one of {', '.join(TEST_TYPES)}")
    script = script or script_of(path)
    if not (ROOT / script).exists():
        raise ConfigError(f"{path}: it wants {script}, which is not here; name one by --script")
    env = {key: str(value) for key, value in (content.get("ENV_VARS") or {}).items()}
    return Recipe(args, env, test_type, script)


def read_recipe(path: Path) -> dict[str, Any]:
    """The mapping in ``path``, every scalar the text it was written as.

    A recipe becomes a command line, where ``1e-4`` must not turn into something else.
    """
    yaml = require("yaml", str(path))
    try:
        value = yaml.load(path.read_text(), Loader=yaml.BaseLoader)
    except yaml.YAMLError as error:
        raise DataError(f"{path}: {' '.join(str(error).split())}") from None
    if not isinstance(value, dict):
        raise DataError(f"{path}: a recipe is a mapping with MODEL_ARGS, this is no mapping")
    return value


def script_of(path: Path) -> str:
    """The entry script that the folders above a recipe speak of."""
    words = re.split(r"[/_\-.]", path.resolve().as_posix().lower())
    return next((SCRIPTS[word] for word in words[-12:] if word in SCRIPTS), "pretrain_gpt.py")


def command(recipe: Recipe, world_size: int, nproc_per_node: int | None = None) -> list[str]:
    """The words to run; one rank needs no launcher."""
    launcher = [sys.executable]
    if world_size > 1:
        launcher += ["-m", "torch.distributed.run", "--nproc-per-node"]
        launcher += [str(nproc_per_node or world_size)]
        nodes = world_size // (nproc_per_node or world_size)
        launcher += ["--nnodes", str(nodes)] if nodes > 1 else ["--standalone"]
    return [*launcher, str(ROOT / recipe.script), *words_of(recipe.args, recipe.env)]


def words_of(args: Mapping[str, Any], env: Mapping[str, str]) -> list[str]:
    """MODEL_ARGS as words: true is a bare flag, false is left out, lists give several words."""
    words: list[str] = []
    missing: set[str] = set()
    for flag, value in args.items():
        if value in ("false", "False"):
            continue
        words.append(flag)
        if value in ("true", "True", ""):
            continue
        for item in value if isinstance(value, list) else [str(value)]:
            text = _expanded(item, env, missing)
            words += shlex.split(text) if _has_several_words(text) else [text]
    if missing:
        names = ", ".join(sorted(missing))
        raise ConfigError(f"the recipe refers to {names}, unset here: export it, or --scale-down")
    return words


def _has_several_words(text: str) -> bool:
    """Blends and batch ramps are several words; a list in brackets is one."""
    return " " in text and text[0] not in "[({"


def _expanded(text: str, env: Mapping[str, str], missing: set[str]) -> str:
    def look_up(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        value = env.get(name, os.environ.get(name))
        if value is None:
            missing.add(name)
        return value or ""

    return re.sub(r"\$(?:\{(\w+)\}|(\w+))", look_up, text)


def _run(recipe: Recipe, words: list[str], log: Path) -> int:
    """Run ``words``, the output shown and kept in ``log``."""
    environment = {**os.environ, **recipe.env}
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    with log.open("w") as kept:
        process = subprocess.Popen(
            words, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for line in process.stdout or ():
            print(line, end="", flush=True)
            kept.write(line)
    return process.wait()


def _run_and_resume(recipe: Recipe, words: list[str], out: Path) -> int:
    """The whole run, then again from its first checkpoint, losses compared bitwise."""
    save = Path(words[words.index("--save") + 1]) if "--save" in words else None
    if save is None or "--save-interval" not in recipe.args:
        print("run_recipe: ckpt-resume needs --save and --save-interval", file=sys.stderr)
        return 2
    code = _run(recipe, words, out / "run.log")
    if code:
        return code
    (save / TRACKER).write_text(f"{recipe.number('--save-interval', 0)}\n")
    if "--load" not in words:
        words = [*words, "--load", str(save)]
    code = _run(recipe, words, out / "resumed.log")
    if code:
        return code
    compare = [sys.executable, str(ROOT / "tools/loss_compare.py"), "--common"]
    return _run(recipe, [*compare, str(out / "run.log"), str(out / "resumed.log")], out / "compare")


if __name__ == "__main__":
    raise SystemExit(main())

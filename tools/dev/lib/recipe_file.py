"""Read functional-test recipes from files, and report what is wrong with them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.core.config.errors import ConfigError, DataError
from megatron.core.text_files import parse_yaml, read_text
from tools.dev.lib.recipe_results import DEFAULT_METRICS, golden_beside

ROOT = Path(__file__).resolve().parents[3]
TEST_TYPES = ("regular", "ckpt-resume", "frozen-start", "frozen-resume", "release")
SCRIPT_VARIABLE = "TRAINING_SCRIPT_PATH"

# A word of the recipe's path -> entry script; used where neither the recipe nor the list of test
# cases that it belongs to names one.
SCRIPTS = {
    "bert": "pretrain_bert.py",
    "t5": "pretrain_t5.py",
    "mamba": "pretrain_mamba.py",
    "hybrid": "pretrain_mamba.py",
    "multimodal": "pretrain_vlm.py",
    "mimo": "examples/mimo/train.py",
    "retro": "pretrain_retro.py",
}
# A word of the path of an entry script that is missing -> the part that it needs.
MISSING_PARTS = {
    "inference": "inference test programs",
    "train_rl": "reinforcement learning",
    "nemo": "NeMo, a program of its own",
}


@dataclass
class Recipe:
    """Flags in file order with their raw values, environment, and what is compared."""

    args: dict[str, Any]
    env: dict[str, str] = field(default_factory=dict)
    test_type: str = "regular"
    script: str = "pretrain_gpt.py"
    args_2: dict[str, Any] | None = (
        None  # flags of ckpt-resume's second run; None: those of the first
    )
    before: str = ""  # shell text around each run
    after: str = ""
    metrics: tuple[str, ...] = DEFAULT_METRICS
    num_repeats: int = 1
    is_compared: bool = True
    golden: Path | None = None

    def number(self, flag: str, default: int) -> int:
        return int(self.args.get(flag, default))


def load(path: Path, script: str | None = None) -> Recipe:
    """Read the recipe in ``path``; references to the environment are not expanded."""
    content = read_recipe(path)
    args = _flags(path, content, "MODEL_ARGS")
    if args is None:
        raise ConfigError(f"{path}: no MODEL_ARGS, so there is nothing to run")
    test_type = content.get("TEST_TYPE") or "regular"
    if test_type not in TEST_TYPES:
        raise ConfigError(f"{path}: TEST_TYPE {test_type} is not one of {', '.join(TEST_TYPES)}")
    script = script or script_of(path, content)
    if not os.path.exists(ROOT / script):
        part = next((f" ({p})" for word, p in MISSING_PARTS.items() if word in script), "")
        raise ConfigError(
            f"{path}: it needs {script}{part}, which is not in this version; --script names another"
        )
    metrics = content.get("METRICS") or DEFAULT_METRICS
    variables = content.get("ENV_VARS") or {}
    if not isinstance(variables, dict):
        raise ConfigError(f"{path}: ENV_VARS is no mapping of variables to values")
    repeats = str(content.get("N_REPEAT") or content.get("N_REPEATS") or 1)
    if not re.fullmatch("[1-9][0-9]{0,5}", repeats):
        raise ConfigError(
            f"{path}: N_REPEAT {repeats[:80]}: a whole number of at least 1 is needed"
        )
    return Recipe(
        args=args,
        env={key: str(value) for key, value in variables.items()},
        test_type=test_type,
        script=script,
        args_2=_flags(path, content, "MODEL_ARGS_2"),
        before=str(content.get("BEFORE_SCRIPT") or ""),
        after=str(content.get("AFTER_SCRIPT") or ""),
        metrics=tuple(metrics) if isinstance(metrics, list) else tuple(str(metrics).split(",")),
        num_repeats=int(repeats),
        is_compared=str(content.get("SKIP_PYTEST") or "0").lower() in ("0", "false", "no"),
        golden=golden_beside(path),
    )


def _flags(path: Path, content: Mapping[str, Any], key: str) -> dict[str, Any] | None:
    args = content.get(key)
    if not isinstance(args, dict):
        return None
    strange = [flag for flag in map(str, args) if not flag.startswith("-")]
    if strange:
        raise ConfigError(f"{path}: {key} {strange[0]} is no flag: it starts with no dash")
    return args


def read_recipe(path: Path) -> dict[str, Any]:
    """Return the mapping in ``path``, every scalar as the text that is written.

    A recipe becomes a command line, where ``1e-4`` must not turn into something else.
    """
    value = parse_yaml(read_text(path, str(path), DataError), str(path), DataError, only_text=True)
    if not isinstance(value, dict):
        raise DataError(f"{path}: a recipe is a mapping with MODEL_ARGS, this is no mapping")
    return {key: _merged(path, entry) for key, entry in value.items()}


def _merged(path: Path, entry: Any) -> Any:
    """Return a mapping with the mappings under ``<<`` merged into it, as YAML does."""
    if not isinstance(entry, dict) or "<<" not in entry:
        return entry
    others = entry["<<"] if isinstance(entry["<<"], list) else [entry["<<"]]
    merged: dict[str, Any] = {}
    for other in reversed(others):  # the first of several wins
        found = _merged(path, other)
        if not isinstance(found, dict):
            raise DataError(f"{path}: << merges mappings, {str(other)[:80]!r} is none")
        merged |= found
    return merged | {key: value for key, value in entry.items() if key != "<<"}


def script_of(path: Path, content: Mapping[str, Any]) -> str:
    """Return the entry script: from the recipe, the list of test cases, or words of the path."""
    named = _named_script(content)
    if named is not None:
        return named
    for cases in _lists_of_cases(path):
        named = _named_script(cases)
        if named is not None:
            return named
    whole = path.resolve()
    inside = whole.relative_to(ROOT) if whole.is_relative_to(ROOT) else whole
    words = re.split(r"[/_\-.]", inside.as_posix().lower())
    return next(
        (SCRIPTS[word] for word in reversed(words[-12:]) if word in SCRIPTS), "pretrain_gpt.py"
    )


def _named_script(content: Mapping[str, Any]) -> str | None:
    """Return TRAINING_SCRIPT_PATH: a key, in ENV_VARS, or set in the shell text of ``script``."""
    spec = content.get("spec")
    places = [content, content.get("ENV_VARS"), spec]
    for place in places:
        if isinstance(place, dict) and place.get(SCRIPT_VARIABLE):
            return str(place[SCRIPT_VARIABLE])
    for place in places:
        text = place.get("script") or place.get("SCRIPT") if isinstance(place, dict) else None
        if not isinstance(text, str):
            continue
        found = re.search(rf"\b{SCRIPT_VARIABLE}=[\"']?([\w./-]+)", text)
        if found:
            return found[1]
        if re.fullmatch(r"[\w./-]+\.py", text.strip()):
            return text.strip()
    return None


def _lists_of_cases(path: Path) -> Iterator[dict[str, Any]]:
    """Yield files of tests/test_utils/recipes that list the test case in the folder of ``path``."""
    case, model = path.resolve().parent, path.resolve().parent.parent.name
    for folder in path.resolve().parents:
        for file in sorted((folder / "test_utils/recipes").glob("**/*.yaml")):
            text = read_text(file, str(file), DataError)
            if re.search(rf"^\s*model: *{re.escape(model)}\s*$", text, re.M) and case.name in text:
                yield read_recipe(file)

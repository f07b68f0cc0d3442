"""Every argument that we hand to Transformer Engine exists in the versions we support.

tests/golden/transformer_engine.json holds, for some of them, the arguments of its classes and
functions, read from their wheels, which cannot be imported without a GPU's libraries:
``python -m tests.unit.extensions.test_signatures FOLDER...`` prints it for unpacked wheels.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import inspect
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import fake_transformer_engine as fake

ROOT = Path(__file__).resolve().parents[3]
GOLDEN: dict[str, dict[str, list[str]]] = {
    version: {name: words.split() for name, words in names.items()}
    for version, names in json.loads(
        (ROOT / "tests/golden/transformer_engine.json").read_text()
    ).items()
}
# What younger versions have: it is asked for, or used only where a flag needs it.
SINCE = {
    "autocast": "2.12.0",  # fp8_autocast before
    "NVFP4BlockScaling": "2.8.0",
    "DotProductAttention.softmax_type": "2.8.0",
    "initialize_ub.quantization_modes": "2.8.0",  # use_fp8 before
}
NAMES = [part.__name__ for part in (*fake.PARTS, *fake.RECIPES)] + ["fp8_autocast"]


def signatures(folder: Path) -> dict[str, list[str]]:
    """By name of class (its constructor), ``Class.forward`` or function: names of arguments."""
    found: dict[str, list[str]] = {}
    paths = [*folder.glob("pytorch/**/*.py"), *folder.glob("common/recipe/*.py")]
    for path in sorted(path for path in paths if "ops" not in path.parts):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name in NAMES:
                found[node.name] = arguments(node)
            elif isinstance(node, ast.ClassDef) and node.name in NAMES:
                found |= of_class(node)
    return dict(sorted(found.items()))


def arguments(function: ast.FunctionDef) -> list[str]:
    every = [a.arg for a in (*function.args.args, *function.args.kwonlyargs)]
    names = [name for name in every if name not in ("self", "_graph")]
    return [*names, *(["**"] if function.args.kwarg else [])]


def of_class(node: ast.ClassDef) -> dict[str, list[str]]:
    functions = {n.name: n for n in node.body if isinstance(n, ast.FunctionDef)}
    fields = [n.target.id for n in node.body if isinstance(n, ast.AnnAssign)]  # type: ignore[union-attr]
    init = arguments(functions["__init__"]) if "__init__" in functions else fields
    found = {node.name: init}
    if "forward" in functions:
        found[f"{node.name}.forward"] = arguments(functions["forward"])
    return found


def of_fake(name: str, part: Any) -> dict[str, list[str]]:
    names = [p for p in inspect.signature(part).parameters if p != "self"]
    found = {name: names}
    if hasattr(part, "forward") and name not in ("LayerNorm", "RMSNorm"):  # whose norm has it
        found[f"{name}.forward"] = [*inspect.signature(part.forward).parameters][1:]
    return found


def is_in(name: str, version: str) -> bool:
    since = SINCE.get(name)
    return since is None or as_numbers(since) <= as_numbers(version)


def as_numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:3])


@pytest.mark.parametrize("version", GOLDEN)
def test_the_stand_in_takes_no_argument_that_the_package_does_not(version):
    known = GOLDEN[version]
    for part in (*fake.PARTS, *fake.RECIPES):
        if not is_in(part.__name__, version):
            assert part.__name__ not in known
            continue
        for name, used in of_fake(part.__name__, part).items():
            for argument in used:
                key = f"{name}.{argument}"
                may_be = argument in known[name] or (argument == "device" and "**" in known[name])
                assert may_be is is_in(key, version), f"{key} in {version}"


def test_the_older_name_of_autocast_takes_what_we_give_it():
    assert {"enabled", "fp8_recipe"} <= set(GOLDEN["2.4.0"]["fp8_autocast"])


def test_what_we_know_of_the_installed_version_is_what_its_wheel_says():
    place = importlib.util.find_spec("transformer_engine")  # without importing it
    if place is None or place.origin is None:
        pytest.skip("transformer-engine is not installed: its wheel is part of the dev extra")
    version = importlib.metadata.version("transformer_engine")
    found = signatures(Path(place.origin).parent)
    if version in GOLDEN:
        assert found == GOLDEN[version]
    for name, known in GOLDEN[max(GOLDEN, key=as_numbers)].items():
        lost = set(known) - set(found[name])
        assert not lost, f"{name} of {version} has lost {sorted(lost)}: hold our calls against it"


if __name__ == "__main__":
    folders = {path.split("/")[-1]: Path(path) / "transformer_engine" for path in sys.argv[1:]}
    lines = {v: {n: " ".join(a) for n, a in signatures(f).items()} for v, f in folders.items()}
    print(json.dumps(lines, indent=1))

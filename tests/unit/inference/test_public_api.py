"""The names under which scripts written for Megatron Core generate text, and what they do."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.repo.source import ROOT

FACTS = json.loads((ROOT / "tests/golden/inference_api.json").read_text())
API: dict[str, dict[str, Any]] = FACTS["api"]
NOT_OFFERED: dict[str, str] = FACTS["not_offered"]


def offered() -> Iterator[tuple[str, str]]:
    for module, names in API.items():
        yield from ((module, n) for n in names if f"{module}:{n}" not in NOT_OFFERED)


def parameters_of(text: str) -> dict[str, tuple[str | None, bool]]:
    """Name -> default and whether it is keyword-only, of a signature such as "(a, *, b=1)"."""
    function = ast.parse(f"def f{text}: ...").body[0]
    assert isinstance(function, ast.FunctionDef)
    a = function.args
    defaults = [None] * (len(a.args) - len(a.defaults)) + [ast.unparse(d) for d in a.defaults]
    out = {p.arg: (d, False) for p, d in zip(a.args, defaults, strict=True)}
    for p, d in zip(a.kwonlyargs, a.kw_defaults, strict=True):
        out[p.arg] = None if d is None else ast.unparse(d), True
    return out


def text_of(value: object) -> str:
    if dataclasses.is_dataclass(value):
        return f"{type(value).__name__}()"
    return repr(value)


def assert_accepts(function: Any, wanted: str, name: str) -> None:
    """``function`` has the wanted parameters in order; others need no argument."""
    found = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
    names = [p.name for p in found if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    expected = parameters_of(wanted)
    assert names[: len(expected)] == list(expected), name
    for p in found:
        if p.name not in expected:
            assert p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD), name
            continue
        default, is_keyword = expected[p.name]
        has = None if p.default is p.empty else text_of(p.default)
        assert has == default, f"{name}: default of {p.name}"
        assert (p.kind is p.KEYWORD_ONLY) == is_keyword, f"{name}: kind of {p.name}"


@pytest.mark.parametrize(("module", "name"), list(offered()), ids=lambda part: part.split(".")[-1])
def test_names_have_the_signatures_of_megatron_core(module: str, name: str) -> None:
    found = getattr(importlib.import_module(module), name)
    wanted = API[module][name]
    if isinstance(wanted, str):
        assert_accepts(found, wanted, name)
        return
    bases = {b.split(".")[-1] for b in wanted.get("bases", ())} - {"ABC", "object"}
    assert bases <= {b.__name__ for b in inspect.getmro(found)}
    if "fields" in wanted:
        fields = {f.name: f for f in dataclasses.fields(found)}
        for field, default in wanted["fields"].items():
            f = fields[field]
            is_list = f.default_factory is list
            has = "field(default_factory=list)" if is_list else text_of(f.default)
            has = None if f.default is dataclasses.MISSING and not is_list else has
            assert has == default, f"default of {name}.{field}"
    for method, signature in wanted.get("methods", {}).items():
        place = f"{module}:{name}.{method}"
        if place in NOT_OFFERED:
            assert method not in vars(found), f"{place} is offered: take it off the list"
            continue
        attribute = inspect.getattr_static(found, method)
        if isinstance(attribute, property):
            continue
        assert_accepts(getattr(found, method), signature, place)


def test_every_name_that_is_not_offered_has_a_reason() -> None:
    assert all(len(reason) > 10 for reason in NOT_OFFERED.values())
    for place in NOT_OFFERED:
        module, _, name = place.partition(":")
        assert name.split(".")[0] in API[module]


@pytest.mark.parametrize(
    ("module", "name", "home"),
    [
        ("engines.mcore_engine", "MCoreEngine", "engines:StaticInferenceEngine"),
        ("common_inference_params", "CommonInferenceParams", "sampling_params:SamplingParams"),
        (
            "text_generation_controllers.simple_text_generation_controller",
            "SimpleTextGenerationController",
            "text_generation_controllers.text_generation_controller:TextGenerationController",
        ),
    ],
)
def test_former_names_are_the_same_classes(module: str, name: str, home: str) -> None:
    package, _, present = home.partition(":")
    found = getattr(importlib.import_module(f"megatron.core.inference.{module}"), name)
    assert found is getattr(importlib.import_module(f"megatron.core.inference.{package}"), present)

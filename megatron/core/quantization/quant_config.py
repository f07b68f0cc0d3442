"""Which layers are quantized, and how: files of globs, in Megatron Core's form and a shorter one.

A file has one of two forms; the first glob that matches the path of a layer decides.

    "*.layers.0.*": none              matchers:
    "*.linear_fc1": fp8                 fc1: {type: glob, pattern: "*.linear_fc1", enabled: true,
                                              config: first}
                                      configs:
                                        first: {recipe: fp8}
"""

from __future__ import annotations

import fnmatch
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.config.errors import ConfigError
from megatron.core.optional import require
from megatron.core.quantization.formats import RECIPES, Recipe
from megatron.core.text_files import read_text

LayerRecipes = Callable[[str], Recipe | None]  # recipe of the layer with this global name
NONE = "none"  # in place of the name of a recipe: the layer is not quantized


def layer_recipes(name: str | None, path: str | None) -> LayerRecipes | None:
    """Return the recipes of a run: of --kitchen-config-file ``path``, else --export-quant-cfg.

    None if neither is given.  Raises ConfigError for a file that cannot be used.
    """
    if name is None and path is None:
        return None
    by_layer = None if path is None else _read(path)

    def recipe_of(layer: str) -> Recipe | None:
        key = None
        if by_layer is not None:
            key = by_layer.match_to_config_key(MatchContext(layer, None))
        if by_layer is not None and key is not None:
            chosen = by_layer.configs[key]
            return None if chosen == NONE else RECIPES[chosen]
        default = None if name is None else RECIPES[name]
        is_skipped = default is None or any(fnmatch.fnmatch(layer, g) for g in default.skipped)
        return None if is_skipped else default

    return recipe_of


def text_of_globs(path: str | None) -> str | None:
    """Return --kitchen-config-file as a JSON object of globs, which its flag takes too.

    Checkpoints hold it, so that they need no file.
    """
    if path is None:
        return None
    found = _read(path)
    chosen: dict[str, str] = {}
    for matcher in found.matchers:
        if isinstance(matcher, GlobMatcher):  # others were refused
            chosen.setdefault(matcher.pattern, found.configs[matcher.config_key])
    return json.dumps(chosen)


def is_text_of_globs(value: object) -> bool:
    """Return whether `text_of_globs` has made a value of --kitchen-config-file."""
    return isinstance(value, str) and value.startswith("{")


def _read(path: str) -> RecipeConfig:
    what = f"--kitchen-config-file {path}"
    yaml = require("yaml", "--kitchen-config-file")
    try:
        text = path if is_text_of_globs(path) else read_text(path, what, ConfigError)
        given = yaml.safe_load(text)
        if "matchers" not in given:
            matchers = [GlobMatcher(str(glob), str(key)) for glob, key in given.items()]
            found = RecipeConfig(matchers, {m.config_key: m.config_key for m in matchers})
        else:
            found = RecipeConfig.from_config_dict({"configs": {}, **given})
    except (yaml.YAMLError, AssertionError, NotImplementedError) as error:
        raise ConfigError(f"{what}: {error}") from None
    except (KeyError, TypeError, AttributeError):
        raise ConfigError(f"{what}: it has neither globs of layers nor matchers") from None
    for matcher in found.matchers:
        assert isinstance(matcher, GlobMatcher), "others were refused"
        key = matcher.config_key
        settings = found.configs.get(key, key)
        name = settings.get("recipe") if isinstance(settings, Mapping) else settings
        if name != NONE and name not in RECIPES:
            shown = f"config {key} has {settings}" if settings != key else f"it has {key}"
            raise ConfigError(
                f"{what}: {matcher.pattern}: {shown}, which is no recipe: give recipe: and one of "
                f"{', '.join(RECIPES)}, {NONE}"
            )
        found.configs[key] = name
    return found


@dataclass
class MatchContext:
    """A layer: its path in the model, and its number."""

    module_path: str
    layer_number: int | None


@dataclass
class QuantizationConfig:
    """Settings of one layer, and why the layer has them."""

    config: dict[str, Any]
    match_input: MatchContext
    config_key: str


class Matcher(ABC):
    """Selection of layers."""

    @abstractmethod
    def match(self, context: MatchContext) -> str | None:
        """Return the key of the layer's settings, or None if the layer is not selected."""


class GlobMatcher(Matcher):
    """Selection of layers whose path matches a shell pattern."""

    def __init__(self, pattern: str, config_key: str) -> None:
        self.pattern = pattern
        self.config_key = config_key

    def match(self, context: MatchContext) -> str | None:
        """Return the key of the settings if the path matches."""
        is_match = fnmatch.fnmatch(context.module_path, self.pattern)
        return self.config_key if is_match else None


class RecipeConfig:
    """Settings by key, and matchers; the first one that matches decides."""

    def __init__(self, matchers: Sequence[Matcher], config_dict: Mapping[str, Any]) -> None:
        self.matchers = list(matchers)
        self.configs = dict(config_dict)

    @staticmethod
    def from_yaml_file(recipe_yaml_path: str) -> RecipeConfig:
        """Read a recipe with the keys ``matchers`` and ``configs``."""
        text = Path(recipe_yaml_path).read_text(encoding="utf-8")
        return RecipeConfig.from_config_dict(require("yaml", "a recipe").safe_load(text))

    @staticmethod
    def from_config_dict(config: Mapping[str, Any]) -> RecipeConfig:
        """Build the matchers of a recipe that are enabled, in order."""
        matchers = []
        for name, matcher in config["matchers"].items():
            if not matcher.get("enabled", False):
                continue
            assert {"type", "pattern", "config"} <= matcher.keys(), (
                f"matcher {name} needs type, pattern and config"
            )
            if matcher["type"] != "glob":
                raise NotImplementedError(f"matcher {name}: its type {matcher['type']} is not glob")
            matchers.append(GlobMatcher(matcher["pattern"], matcher["config"]))
        return RecipeConfig(matchers, config["configs"])

    def match_to_config_key(self, operator_context: MatchContext) -> str | None:
        """Return the key of a layer's settings, or None."""
        found = (matcher.match(operator_context) for matcher in self.matchers)
        return next((key for key in found if key is not None), None)

    def match(self, operator_context: MatchContext) -> QuantizationConfig | None:
        """Return a copy of a layer's settings, or None."""
        key = self.match_to_config_key(operator_context)
        if key is None:
            return None
        return QuantizationConfig(deepcopy(self.configs[key]), operator_context, key)


def load_quantization_recipe(recipe_path: str) -> RecipeConfig:
    """Read a recipe from a YAML file."""
    return RecipeConfig.from_yaml_file(recipe_path)


def get_quant_config_or_none(
    module_path: str, recipe: RecipeConfig | None = None
) -> QuantizationConfig | None:
    """Return the settings that ``recipe`` has for a module, or None."""
    number = re.search(r"layers\.(\d+)", module_path)
    context = MatchContext(module_path, int(number[1]) if number else None)
    return None if recipe is None else recipe.match(context)


def kitchen_quantization_recipe_config(recipe_idx: int) -> RecipeConfig:
    """Return the recipe by which the kitchen package quantizes all layers."""
    settings = {"kitchen_config_type": "QLinearParams", "recipe_idx": recipe_idx}
    return RecipeConfig([GlobMatcher("*", "default")], {"default": settings})

"""Megatron Core's helpers around configs: experimental code, quantization recipes, storage, graphs.

What a helper of Megatron Core switches on, this project does always or never; the helper says so.
"""

from __future__ import annotations

import fnmatch
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from megatron.core.optional import available, require

T = TypeVar("T", bound=Callable[..., Any])
__version__ = "0.14.0"  # Megatron Core's release whose API this project has

# -- experimental code: a project marks its own functions and classes ------------------------------

_flags = {"experimental": False}


class ExperimentalNotEnabledError(Exception):
    """Experimental code is used, and `set_experimental_flag` has not allowed it."""


def set_experimental_flag(flag: bool) -> None:
    """Allow, or forbid, functions and classes that are marked as experimental."""
    _flags["experimental"] = flag


def is_experimental_enabled() -> bool:
    """Return whether experimental code may run."""
    return _flags["experimental"]


def experimental_fn(introduced_with_version: str) -> Callable[[T], T]:
    """Return a decorator of a function that raises ExperimentalNotEnabledError unless allowed."""
    del introduced_with_version

    def decorate(function: T) -> T:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not is_experimental_enabled():
                raise ExperimentalNotEnabledError(
                    f"{function.__name__} is experimental: call set_experimental_flag(True) first"
                )
            return function(*args, **kwargs)

        return call  # type: ignore[return-value]

    return decorate


def experimental_cls(introduced_with_version: str) -> Callable[[type], type]:
    """Return a decorator of a class whose construction raises unless experimental code may run."""

    def decorate(cls: type) -> type:
        cls.__init__ = experimental_fn(introduced_with_version)(cls.__init__)  # type: ignore[misc]
        return cls

    return decorate


# -- quantization recipes: which layers a project quantizes, and how -------------------------------


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


# -- low precision: layers quantize by their config, without a context around them -----------------

HAVE_TE_FP8_TENSOR_CLASS = False
FP8_TENSOR_CLASS = None


def get_fp8_context(
    config: object, layer_no: int = -1, is_init: bool = False
) -> AbstractContextManager[None]:
    """Return a context without effect: each layer quantizes as its config says."""
    del config, layer_no, is_init
    return nullcontext()


get_fp4_context = get_fp8_context


def correct_amax_history_if_needed(model: Sequence[nn.Module]) -> None:
    """Do nothing: scales of this project are right after a load."""


# -- compiled functions and graphs -----------------------------------------------------------------


def jit_fuser(function: T) -> T:
    """Return ``function`` unchanged: compiling small functions took longer than it saved."""
    return function


def disable_jit_fuser() -> None:
    """Do nothing: `jit_fuser` compiles nothing."""


class FullCudaGraphWrapper:
    """Schedule that Megatron Core captures as one graph; this project runs it without capture.

    The configuration's ``enable_cuda_graph`` captures layers; ``cuda_graph_scope``
    ``full_iteration`` needs this project's training loop.
    """

    curr_iteration = {"training": 0, "validation": 0}
    cuda_graph: dict[str, Any] = {"training": None, "validation": None}
    result: dict[str, Any] = {"training": None, "validation": None}

    def __init__(
        self, forward_backward_func: Callable[..., Any], cuda_graph_warmup_steps: int = 1
    ) -> None:
        self.forward_backward_func = forward_backward_func
        self.cuda_graph_warmup_steps = cuda_graph_warmup_steps

    def __call__(self, **kwargs: Any) -> Any:
        stage = "validation" if kwargs["forward_only"] else "training"
        self.result[stage] = self.forward_backward_func(**kwargs)
        self.next_iter(stage)
        return self.result[stage]

    def curr_iter(self, stage: str) -> int:
        """Return the number of calls for ``stage``, training or validation."""
        return self.curr_iteration[stage]

    def next_iter(self, stage: str) -> None:
        """Count a call."""
        self.curr_iteration[stage] += 1


# -- storage ---------------------------------------------------------------------------------------


class _StorageClient:
    """Switch of the Multi-Storage Client, a package that opens files in object storage."""

    def __init__(self) -> None:
        self._is_on = True

    def enable(self) -> None:
        """Use the package if it is installed, which is the default."""
        self._is_on = True

    def disable(self) -> None:
        """Do not use the package."""
        self._is_on = False

    def is_enabled(self) -> bool:
        """Return whether the package is used."""
        return self._is_on and available("multistorageclient")

    def import_package(self) -> Any:
        """Return the package.  Raises RuntimeError if it is switched off."""
        if not self._is_on:
            raise RuntimeError("the Multi-Storage Client is disabled: call enable() first")
        return require("multistorageclient", "MultiStorageClientFeature")


MultiStorageClientFeature = _StorageClient()


def open_file(*args: Any, **kwargs: Any) -> Any:
    """Open a file, in object storage too if the Multi-Storage Client is used."""
    if MultiStorageClientFeature.is_enabled():
        return MultiStorageClientFeature.import_package().open(*args, **kwargs)
    return open(*args, **kwargs)

"""A module of Transformer Engine that computes with parameters of ours.

Parameters, their records and their names stay those of our own layers: so do initial values,
checkpoints and optimizer states, whatever computes.  The package's module is made on meta, is
hidden from torch, and is given the parameters anew in each call.  What it alone could save are
histories of delayed scaling, pickled and cut as the layout is: matrices of that recipe stay ours.

Versions 2.4 to 2.20 of the package are known: tests/golden/transformer_engine.json.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from types import ModuleType

import torch
from torch import Tensor, nn

from megatron.core import device, optional
from megatron.core.config.errors import ConfigError
from megatron.core.tensor_parallel.weight_gradient import adds_to_main_grad
from megatron.core.transformer.transformer_config import TransformerConfig

WANTED_BY = "--transformer-impl transformer_engine"
_LAYER = "a layer of Transformer Engine, of --spec or a script"
_PACKAGE, _OLDEST = "transformer_engine", (2, 4)
_PYTORCH, _RECIPE = f"{_PACKAGE}.pytorch", f"{_PACKAGE}.common.recipe"
DTYPES = (torch.bfloat16, torch.float16)  # of its kernels; products of fp32 come out as TF32
_RECIPES = {
    "tensorwise": "Float8CurrentScaling",
    "blockwise": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
}


def package() -> ModuleType:
    """Its layers.  Raises MissingDependency, or ConfigError where there is no GPU."""
    layers = optional.require(_PYTORCH, _LAYER)
    if (reason := _why_no_gpu()) is not None:
        raise ConfigError(f"{_LAYER}: {reason}; use one of our own")
    return layers


def unsupported_reason() -> str | None:
    """Why its layers cannot run here; None where they can."""
    reason = optional.why_missing(_PYTORCH)
    if reason is None:
        version = optional.require(_PACKAGE, WANTED_BY).__version__
        if tuple(map(int, version.split(".")[:2])) < _OLDEST:
            reason = f"version {version} is older than 2.4"
    return reason or _why_no_gpu()


def _why_no_gpu() -> str | None:
    here = device.current()
    return None if device.launches_kernels(here) else f"it needs a GPU, and the device is {here}"


def unsupported_matrices_reason(config: TransformerConfig) -> str | None:
    """Why our own layers do the matrix products of this model; None where Transformer Engine may.

    It has to import here.
    """
    if config.why_own_matrices is not None:
        return config.why_own_matrices
    if config.params_dtype not in DTYPES:
        return f"our own layers keep all bits of {config.params_dtype} in products"
    if not config.is_quantized:
        return None
    name = _recipe_name(config)
    if not hasattr(optional.require(_RECIPE, WANTED_BY), name):
        return f"--{config.format_flag}: this version of Transformer Engine has no {name}"
    return None


def recipe_of(config: TransformerConfig) -> object:
    """The package's recipe of this model's format.  Raises ConfigError where it has none."""
    reason = unsupported_matrices_reason(config)
    if reason is not None:
        raise ConfigError(f"the spec of the layer names matrices of Transformer Engine: {reason}")
    recipes = optional.require(_RECIPE, WANTED_BY)
    make = getattr(recipes, _recipe_name(config))
    if config.fp4 is not None:
        return make()
    is_hybrid = config.fp8 == "hybrid"
    return make(fp8_format=recipes.Format.HYBRID if is_hybrid else recipes.Format.E4M3)


def _recipe_name(config: TransformerConfig) -> str:
    return "NVFP4BlockScaling" if config.fp4 is not None else _RECIPES[config.fp8_recipe]


class Engine:
    """Calls a module of the package, of class ``kind``, with what ``parameters`` gives by name."""

    def __init__(
        self,
        kind: str,
        config: TransformerConfig,
        parameters: Callable[[], Mapping[str, nn.Parameter | None]],
        **arguments: object,
    ) -> None:
        self.module = getattr(package(), kind)(
            **arguments, params_dtype=config.params_dtype, device="meta"
        )
        self._parameters = parameters
        self.recipe: object = None  # of products in 8 or 4 bits
        self._seen: list[tuple[int, int]] = []

    def __call__(self, x: Tensor, *of_layer: object) -> Tensor:
        """As the quantizer of `linear`; the module knows what else the layer says."""
        return self.run(x)

    def run(self, x: Tensor, *more: object) -> Tensor:
        """What the module makes of ``x``; collective where it was told of a group."""
        given = {name: p for name, p in self._parameters().items() if p is not None}
        self.module._parameters.update(given)
        weights = [p for p in given.values() if p.dim() == 2]
        for weight in weights:
            if adds_to_main_grad(weight):
                # Its modules add to zeros: without the attribute the buffer is zeroed for them.
                del weight.overwrite_main_grad
                self.module.fuse_wgrad_accumulation = True
        if self.recipe is None:
            y: Tensor = self.module(x, *more)
        else:
            with quantized(self.recipe):
                y = self.module(x, *more, is_first_microbatch=self._has_changed(weights))
        return y

    def _has_changed(self, weights: list[nn.Parameter]) -> bool | None:
        """Whether weights are to be quantised anew; None: they are not to be kept.

        As with `LinearQuantizer` they are kept where ``main_grad`` tells of whole weights.  Weights
        change between steps alone: the package writes the gradient of the first pass over what is
        there, and adds the others.
        """
        if not torch.is_grad_enabled() or not all(hasattr(p, "main_grad") for p in weights):
            return None
        now = [(p.data_ptr(), p._version) for p in weights]
        before, self._seen = self._seen, now
        return now != before


def quantized(recipe: object) -> contextlib.AbstractContextManager[object]:
    """Products inside are quantised by ``recipe``, also those of their backward pass.

    It is entered around each module, so that a recomputed pass finds it wherever it begins.
    """
    te = package()
    if hasattr(te, "autocast"):
        return te.autocast(enabled=True, recipe=recipe)  # type: ignore[no-any-return]
    return te.fp8_autocast(enabled=True, fp8_recipe=recipe)  # type: ignore[no-any-return]

"""Transformer Engine modules that compute with the parameters of our own layers.

Parameters, their ParamInfo and their names are those of our layers, so initial values, checkpoints
and optimizer states do not depend on the implementation.  The package's module is created on the
meta device, is not a registered submodule, and receives the parameters before each call.  Its only
own state is the scales of delayed scaling, which `delayed_scaling` sets.

Supported are versions 2.4 to 2.20 of the package.  A test checks the names of all arguments that we
pass against the signatures of some of them (tests/golden/transformer_engine.json).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from types import ModuleType

import torch
from torch import Tensor, nn

from megatron.core import device, optional
from megatron.core.config.errors import ConfigError
from megatron.core.extensions.transformer_engine.delayed_scaling import EngineAmax
from megatron.core.tensor_parallel.weight_gradient import adds_to_main_grad
from megatron.core.transformer.transformer_config import TransformerConfig

WANTED_BY = "--transformer-impl transformer_engine"
_LAYER = "a layer of Transformer Engine, of --spec or a script"
_PACKAGE = "transformer_engine"
_OLDEST = (2, 4)
_PYTORCH = f"{_PACKAGE}.pytorch"
_RECIPE = f"{_PACKAGE}.common.recipe"
DTYPES = (torch.bfloat16, torch.float16)  # fp32 is excluded: the package's GEMMs use TF32
_RECIPES = {
    "delayed": "DelayedScaling",
    "tensorwise": "Float8CurrentScaling",
    "blockwise": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
}


def package() -> ModuleType:
    """Return the package's PyTorch API.  Raises MissingDependency, or ConfigError without a GPU."""
    layers = optional.require(_PYTORCH, _LAYER)
    if (reason := _why_no_gpu()) is not None:
        raise ConfigError(f"{_LAYER}: {reason}; use a layer of this program")
    return layers


def unsupported_reason() -> str | None:
    """Return why the package's layers cannot run on this machine; None if they can."""
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
    """Return why our own layers must compute this model's GEMMs; None if Transformer Engine may.

    The package must be installed.
    """
    if config.why_own_matrices is not None:
        return config.why_own_matrices
    if config.params_dtype not in DTYPES:
        return f"this program's layers compute matmuls in full {config.params_dtype} precision"
    if not config.is_quantized:
        return None
    name = _recipe_name(config)
    if not hasattr(optional.require(_RECIPE, WANTED_BY), name):
        return f"--{config.format_flag}: this version of Transformer Engine has no {name}"
    return None


def recipe_of(config: TransformerConfig) -> object:
    """Return the package's recipe for the model's fp8 or fp4 flags.

    Raises ConfigError if our own layers must compute the GEMMs.
    """
    reason = unsupported_matrices_reason(config)
    if reason is not None:
        raise ConfigError(f"the spec of the layer names matrices of Transformer Engine: {reason}")
    recipes = optional.require(_RECIPE, WANTED_BY)
    make = getattr(recipes, _recipe_name(config))
    if config.fp4 is not None:
        return make()
    given: dict[str, object] = {
        "fp8_format": recipes.Format.HYBRID if config.fp8 == "hybrid" else recipes.Format.E4M3
    }
    if config.fp8_recipe == "delayed":
        given |= {
            "margin": config.fp8_margin,
            "amax_history_len": config.fp8_amax_history_len,
            "amax_compute_algo": config.fp8_amax_compute_algo,
        }
    return make(**given)


def _recipe_name(config: TransformerConfig) -> str:
    return "NVFP4BlockScaling" if config.fp4 is not None else _RECIPES[config.fp8_recipe]


class Engine:
    """Calls a module of the package, of class ``kind``, with the parameters of our layer.

    ``parameters`` returns them by the package's names; ``arguments`` are those of the constructor.
    """

    def __init__(
        self,
        kind: str,
        config: TransformerConfig,
        parameters: Callable[[], Mapping[str, nn.Parameter | None]],
        **arguments: object,
    ) -> None:
        arguments |= {"params_dtype": config.params_dtype, "device": "meta"}
        self._kind = kind
        self._arguments = arguments
        self.module = getattr(package(), kind)(**arguments)
        self._parameters = parameters
        self.recipe: object = None  # the package's fp8 or fp4 recipe
        self.amax: EngineAmax | None = None  # of delayed scaling
        self._seen: list[tuple[int, int]] = []  # (address, version) of the last call's weights

    def rebuild(self, **more: object) -> None:
        """Create the module anew with ``more`` arguments for its constructor."""
        self.module = getattr(package(), self._kind)(**self._arguments, **more)

    def __call__(self, x: Tensor, *of_layer: object) -> Tensor:
        """Run as the quantizer of `linear`; the module has the layer's other arguments already."""
        return self.run(x)

    def run(self, x: Tensor, *more: object) -> Tensor:
        """Run the module on ``x``.  Collective if the module was built with a group."""
        given = {name: p for name, p in self._parameters().items() if p is not None}
        self.module._parameters.update(given)
        weights = [p for p in given.values() if p.dim() == 2]
        for weight in weights:
            if adds_to_main_grad(weight):
                # The package adds to main_grad and does not know this attribute.  Without it, the
                # gradient buffer is zeroed before each step.
                del weight.overwrite_main_grad
                self.module.fuse_wgrad_accumulation = True
        if self.recipe is None:
            y: Tensor = self.module(x, *more)
        else:
            with quantized(self.recipe):
                if self.amax is not None:
                    self.amax.prepare(self.module, weights[0])
                y = self.module(x, *more, is_first_microbatch=self._has_changed(weights))
        return y

    def _has_changed(self, weights: list[nn.Parameter]) -> bool | None:
        """Return whether weights must be quantized again; None: the package must not cache them.

        As in `LinearQuantizer`, they are cached if ``main_grad`` shows that a data-parallel wrapper
        keeps complete weights.  The result is passed as ``is_first_microbatch``, by which the
        package also overwrites gradients instead of adding: weights may change between steps only.
        """
        if not torch.is_grad_enabled() or not all(hasattr(p, "main_grad") for p in weights):
            return None
        now = [(p.data_ptr(), p._version) for p in weights]
        before = self._seen
        self._seen = now
        return now != before


def quantized(recipe: object) -> contextlib.AbstractContextManager[object]:
    """Return the package's autocast: GEMMs inside it, and their backward pass, use ``recipe``.

    Each module call enters it separately, so that recomputation may begin at any module.
    """
    te = package()
    if hasattr(te, "autocast"):
        return te.autocast(enabled=True, recipe=recipe)  # type: ignore[no-any-return]
    return te.fp8_autocast(enabled=True, fp8_recipe=recipe)  # type: ignore[no-any-return]

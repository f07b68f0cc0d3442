"""Flags that import user code."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from megatron.core.config.option import option

_extensions = partial(option, group="extensions", nargs="+", repeatable=True)


@dataclass(frozen=True, kw_only=True)
class ExtensionsConfig:
    import_module: tuple[str, ...] = _extensions(
        (),
        "Python modules to import at start, from PYTHONPATH or the working directory, that "
        "register model kinds, metrics, optimizers, tokenizers or datasets. May be given several "
        "times.",
    )
    callback: tuple[str, ...] = _extensions(
        (),
        "Callbacks to add after the built-in ones, each as MODULE:CLASS, a subclass of "
        "megatron.training.callbacks.Callback whose constructor needs no arguments. May be given "
        "several times.",
    )

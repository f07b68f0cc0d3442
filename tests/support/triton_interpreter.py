"""Triton's interpreter, with repairs: scalars of NumPy 2.4, matmuls in bfloat16, and its speed."""

from __future__ import annotations

import importlib
import types
from typing import Any

import numpy as np
import numpy.typing as npt


def mend() -> None:
    """Let scalars be indices: they are arrays of one.  Convert bfloat16 before matmuls.

    Replace the functions of the language once a launch, not in each call of a function, too.
    """
    interpreter = importlib.import_module("triton.runtime.interpreter")
    language = types.SimpleNamespace(
        __globals__={"tl": interpreter.tl, "core": interpreter.tl.core}
    )
    patch_language = interpreter._patch_lang
    interpreter._patch_lang = lambda kernel: patch_language(language)
    interpreter.InterpretedFunction.__call__ = lambda self, *args, **kwargs: self.rewrite()(
        *args, **kwargs
    )
    patch = interpreter._patch_lang_tensor

    def patch_and_mend(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_and_mend
    multiply = interpreter.InterpreterBuilder.create_dot

    def multiply_values(self: Any, a: Any, b: Any, *args: Any) -> Any:
        wide = [
            interpreter.TensorHandle(_as_float(x.data), interpreter.tl.float32)
            if x.data.dtype == np.uint16
            else x
            for x in (a, b)
        ]
        return multiply(self, *wide, *args)

    interpreter.InterpreterBuilder.create_dot = multiply_values


def _as_float(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """Return the values of bfloat16 numbers, which the interpreter stores as their bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)

"""Triton's interpreter, as far as its release 3.6 has to be mended for NumPy 2.4."""

from __future__ import annotations

import importlib
from typing import Any


def mend() -> None:
    """Let scalars be numbers: they are arrays of one, which NumPy takes for no index."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    patch = interpreter._patch_lang_tensor

    def patch_and_mend(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_and_mend

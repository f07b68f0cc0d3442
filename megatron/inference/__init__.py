"""Serving: generation from Python, the text of requests, and the server that answers over HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.core.optional import lazy_exports

if TYPE_CHECKING:
    from megatron.inference.llm import LLM as LLM
    from megatron.inference.llm import LoRARequest as LoRARequest
    from megatron.inference.llm import PromptWithImages as PromptWithImages

__getattr__ = lazy_exports(
    __name__,
    dict.fromkeys(("LLM", "LoRARequest", "PromptWithImages"), "megatron.inference.llm"),
)

"""The path under which scripts import `InferenceParams`, the former name of a static context."""

from megatron.core.optional import lazy_exports

__getattr__ = lazy_exports(
    __name__,
    {"InferenceParams": "megatron.core.inference.contexts.inference_params"},
)

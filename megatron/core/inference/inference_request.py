"""Requests, under its module path in Megatron-LM."""

from megatron.core.inference.v014.requests import DynamicInferenceRequest as DynamicInferenceRequest
from megatron.core.inference.v014.requests import InferenceRequest as InferenceRequest
from megatron.core.inference.v014.requests import Status as Status
from megatron.core.inference.v014.requests import VLMInferenceRequest as VLMInferenceRequest

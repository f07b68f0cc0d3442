"""Contexts, under its module path in Megatron-LM."""

from megatron.core.inference.v014.contexts import BaseInferenceContext as BaseInferenceContext
from megatron.core.inference.v014.contexts import DynamicInferenceContext as DynamicInferenceContext
from megatron.core.inference.v014.contexts import StaticInferenceContext as StaticInferenceContext

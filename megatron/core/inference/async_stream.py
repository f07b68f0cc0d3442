"""Streams of texts, under its module path in Megatron-LM."""

from megatron.core.inference.v014.requests import AsyncStream as AsyncStream

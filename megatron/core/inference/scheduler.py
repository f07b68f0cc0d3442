"""Requests by state, under its module path in Megatron-LM."""

from megatron.core.inference.v014.requests import Scheduler as Scheduler

"""Megatron-LM's classes for generation (core_v0.14), as adapters on the paged engine.

Scripts import them by Megatron-LM's module paths (`engines`, `contexts`, `scheduler`,
`text_generation_controllers`, `model_inference_wrappers` and others), which export them from here.
The paged engine schedules the requests and holds their keys and values.
"""

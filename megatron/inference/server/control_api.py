"""Paths for operators and reinforcement learning: weights, adapters, pauses, the prefix cache.

Names and bodies are vLLM's; a checkpoint is pushed by its path, as in SGLang.
"""

from __future__ import annotations

import os
from typing import Any

from megatron.inference.server.fields import ApiError, Body, Fields
from megatron.inference.server.generation import Service
from megatron.inference.server.http import json_answer, responses

_TIMEOUT_S = 600.0
CONTROL = "control"  # features of an engine: see `EngineInfo`
RUNTIME_ADAPTERS = "runtime_adapters"


async def answer_update_weights(service: Service, request: Any, body: Body) -> Any:
    """POST /update_weights: load the weights of another checkpoint of the same model."""
    _check(service, CONTROL)
    fields = Fields(body)
    name = "model_path" if "model_path" in body else "load"
    path = fields.text(name, None)
    if not path:
        raise ApiError(f"{name}: give the directory of a checkpoint", name)
    fields.refuse_others(("flush_cache", "load_format"))
    found = await service.client.ask("update_weights", _TIMEOUT_S, load=path)
    if "error" in found:
        raise ApiError(f"{name}: {found['error']}", name)
    version = found["version"]
    more = {"success": True, "message": f"the weights of {path} are loaded"}
    return json_answer({"weight_version": version, **(more if name == "model_path" else {})})


async def answer_pause(service: Service, request: Any, body: Body) -> Any:
    """POST /pause: stop steps; ``mode`` says what open requests do."""
    _check(service, CONTROL)
    fields = Fields({**request.query_params, **body})
    mode = fields.choice("mode", "abort", ("abort", "wait", "keep"))
    clears = fields.choice("clear_cache", "true", ("true", "false")) == "true" and mode != "keep"
    fields.refuse_others()
    service.client.refuses_requests = mode != "keep"  # at once: none comes between
    await service.client.ask("pause", _TIMEOUT_S, mode=mode, clears=clears)
    service.client.refuses_requests = mode != "keep"  # an earlier /resume may be answered by now
    return json_answer({"status": "paused"})


async def answer_resume(service: Service, request: Any, body: Body) -> Any:
    """POST /resume: go on."""
    _check(service, CONTROL)
    await service.client.ask("resume", _TIMEOUT_S)
    service.client.refuses_requests = False
    return json_answer({"status": "resumed"})


async def answer_reset_prefix_cache(service: Service, request: Any, body: Body) -> Any:
    """POST /reset_prefix_cache: later requests compute the beginnings of their prompts again."""
    _check(service, CONTROL)
    await service.client.ask("reset_prefix_cache", _TIMEOUT_S)
    return json_answer({"success": True})


async def answer_load_adapter(service: Service, request: Any, body: Body) -> Any:
    """POST /v1/load_lora_adapter: read an adapter from a folder."""
    _check(service, RUNTIME_ADAPTERS)
    fields = Fields(body)
    name, path = fields.text("lora_name", None), fields.text("lora_path", None)
    replaces = fields.boolean("load_inplace")
    fields.refuse_others(("is_3d_lora_weight",))
    if not name or not path:
        raise ApiError("lora_name, lora_path: give the adapter's name and its folder", "lora_name")
    if name == service.model.info.model:
        raise ApiError(f"lora_name: {name} is the name of the model; give another", "lora_name")
    if name in service.adapters and not replaces:
        text = f"lora_name: {name} is loaded; give another name, or load_inplace to replace it"
        raise ApiError(text, "lora_name")
    found = await service.client.ask("load_adapter", _TIMEOUT_S, name=name, path=path)
    if "error" in found:
        status = 400 if os.path.isdir(path) else 404
        raise ApiError(f"lora_path: {found['error']}", "lora_path", status=status)
    service.adapters[name] = path
    return responses.PlainTextResponse(f"adapter {name} is loaded")


async def answer_unload_adapter(service: Service, request: Any, body: Body) -> Any:
    """POST /v1/unload_lora_adapter: refuse the name from now on; open requests go on."""
    _check(service, RUNTIME_ADAPTERS)
    fields = Fields(body)
    name = fields.text("lora_name", None)
    fields.refuse_others(("lora_int_id",))
    if not name:
        raise ApiError("lora_name: give the name of an adapter", "lora_name")
    if service.adapters.pop(name, None) is None:
        raise ApiError(f"lora_name: no adapter is called {name}", "lora_name", status=404)
    await service.client.ask("unload_adapter", _TIMEOUT_S, name=name)
    service.adapters.pop(name, None)  # an earlier load may be answered by now
    return responses.PlainTextResponse(f"adapter {name} is removed")


def _check(service: Service, feature: str) -> None:
    if feature not in service.model.info.features:
        raise ApiError(_WHY_NOT[feature], status=501)


_WHY_NOT = {
    CONTROL: "this server is not controlled over the network: start it with --api-key-file",
    RUNTIME_ADAPTERS: "this server loads no adapters at run time: start it with --lora-modules "
    "NAME=FOLDER, or with --allow-runtime-lora-updating",
}

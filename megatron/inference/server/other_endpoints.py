"""Endpoints that generate nothing: models, tokens, weights."""

from __future__ import annotations

import time
from typing import Any

from megatron.inference.server.endpoint import Service, json_answer
from megatron.inference.server.errors import ApiError
from megatron.inference.server.fields import Body, Fields

_STARTED_AT = int(time.time())
_MAX_TOKENS = 1 << 20
_UPDATE_TIMEOUT_S = 600.0


def answer_models(service: Service, name: str | None) -> Any:
    """GET /v1/models and /v1/models/NAME."""
    info = service.model.info
    found = {
        "id": info.model,
        "object": "model",
        "created": _STARTED_AT,
        "owned_by": "megatron",
        "max_model_len": info.max_sequence_length,
    }
    if name is None:
        return json_answer({"object": "list", "data": [found]})
    if name != info.model:
        raise ApiError(
            f"the model {name[:80]!r} does not exist", "model", status=404, code="model_not_found"
        )
    return json_answer(found)


def answer_tokenizer_info(service: Service) -> Any:
    """GET /tokenizer_info: what a client needs that tokenizes by this server, such as lm-eval."""
    model = service.model
    return json_answer(
        {
            "tokenizer_class": model.tokenizer.name,
            "bos_token": model.special_text("bos"),
            "eos_token": model.special_text("eos") or model.special_text("eod"),
            "pad_token": model.special_text("pad"),
            "chat_template": None if service.template is None else service.template.source,
        }
    )


async def answer_tokenize(service: Service, request: Any, body: Body) -> Any:
    """POST /tokenize: text -> ids."""
    fields = Fields(body)
    model = service.model
    service.check_model(fields)
    text = fields.text("prompt", None)
    if text is None:
        raise ApiError("prompt: give a text", "prompt")
    is_plain = not fields.boolean("add_special_tokens", True)
    fields.refuse_others()
    (ids,) = await model.tokenize([text], is_plain=is_plain)
    longest = model.info.max_sequence_length
    return json_answer({"tokens": ids, "count": len(ids), "max_model_len": longest})


async def answer_detokenize(service: Service, request: Any, body: Body) -> Any:
    """POST /detokenize: ids -> text."""
    fields = Fields(body)
    model = service.model
    service.check_model(fields)
    ids = fields.token_ids("tokens", fields.get("tokens"), model.info.vocab_size, _MAX_TOKENS)
    fields.refuse_others()
    (text,) = await model.decode_all([ids])
    return json_answer({"prompt": text})


async def answer_update_weights(service: Service, request: Any, body: Body) -> Any:
    """POST /update_weights: load the weights of another checkpoint of the same model."""
    if "update_weights" not in service.model.info.features:
        raise ApiError("the engine of this server cannot update its weights", status=501)
    fields = Fields(body)
    path = fields.text("load", None)
    if not path:
        raise ApiError("load: give the directory of a checkpoint", "load")
    fields.refuse_others()
    found = await service.client.ask("update_weights", _UPDATE_TIMEOUT_S, load=path)
    if found["error"]:
        raise ApiError(f"load: {found['error']}", "load")
    return json_answer({"weight_version": found["version"]})

"""The routes of the front end, its frame of each request, and endpoints that generate nothing."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from megatron.core.config.errors import MegatronError
from megatron.core.inference.paged_engine.request import text_of
from megatron.core.optional import require
from megatron.inference.server.control_api import (
    answer_load_adapter,
    answer_pause,
    answer_reset_prefix_cache,
    answer_resume,
    answer_unload_adapter,
    answer_update_weights,
)
from megatron.inference.server.embeddings_api import answer_embeddings
from megatron.inference.server.engine_link import EngineDied
from megatron.inference.server.fields import ApiError, Body, Fields, as_api_error
from megatron.inference.server.generation import Service
from megatron.inference.server.http import (
    ClientGone,
    check_framing,
    check_key,
    check_site,
    json_answer,
    read_json,
    responses,
)
from megatron.inference.server.megatron_api import answer_api
from megatron.inference.server.openai_api import ChatPrompt, ChatRequest, CompletionRequest, answer
from megatron.inference.server.openapi import Route, describe, version
from megatron.inference.server.responses_api import ResponsesRequest

starlette = require("starlette.applications", "the server")
routing = require("starlette.routing", "the server")
requests = require("starlette.requests", "the server")
exceptions = require("starlette.exceptions", "the server")

_LOG = logging.getLogger(__name__)
_FOLDER = Path(__file__).parent
_PAGE_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; frame-ancestors 'none'"
)
_HEALTH_TIMEOUT_S = 10.0


class FrontEnd:
    """The ASGI application.  It answers 503 until it has a ``service``, and while it drains.

    ``loopback_name``: the name of --host, if only this machine reaches the server.
    """

    def __init__(
        self, keys: Sequence[str], max_body_bytes: int, loopback_name: str | None = None
    ) -> None:
        self.service: Service | None = None
        self._is_draining = False
        self._keys = keys
        self._loopback_name = loopback_name
        self._max_body_bytes = max_body_bytes
        self._num_active = 0
        self._routes = [
            Route("POST", "/v1/completions", partial(answer, CompletionRequest)),
            Route("POST", "/completions", partial(answer, CompletionRequest)),
            Route("POST", "/v1/chat/completions", partial(answer, ChatRequest)),
            Route("POST", "/v1/responses", partial(answer, ResponsesRequest)),
            Route("POST", "/tokenize", answer_tokenize),
            Route("POST", "/detokenize", answer_detokenize),
            Route("POST", "/v1/embeddings", answer_embeddings),
            Route("POST", "/v1/load_lora_adapter", answer_load_adapter),
            Route("POST", "/v1/unload_lora_adapter", answer_unload_adapter),
            Route("POST", "/update_weights", answer_update_weights),
            Route("POST", "/update_weights_from_disk", answer_update_weights),
            Route("POST", "/pause", answer_pause, may_be_empty=True),
            Route("POST", "/resume", answer_resume, may_be_empty=True),
            Route("GET", "/is_paused", self._is_paused),
            Route("POST", "/reset_prefix_cache", answer_reset_prefix_cache, may_be_empty=True),
            Route("PUT", "/api", answer_api),
            Route("GET", "/v1/models", self._models),
            Route("GET", "/v1/models/{name:path}", self._models),
            Route("GET", "/tokenizer_info", self._tokenizer_info),
            Route("GET", "/health", self._health, is_open=True),
            Route("GET", "/ping", self._health, is_open=True),
            Route("GET", "/version", self._version),
            Route("GET", "/metrics", self._metrics),
            Route("GET", "/openapi.json", self._openapi, is_open=True),
        ]
        routes = [
            *map(self._guarded, self._routes),
            routing.Route("/", partial(_page, "page.html")),
            routing.Route("/docs", partial(_page, "docs.html")),
        ]
        handlers = {
            exceptions.HTTPException: _no_route,
            MegatronError: _failed,
            ClientGone: _gone,
            Exception: _unexpected,
        }
        self._app = starlette.Starlette(routes=routes, exception_handlers=handlers)
        self._app.router.redirect_slashes = False  # the target would have the client's Host

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request; count it, and count it as active until its answer is sent."""
        if scope["type"] != "http":
            return

        async def counting_send(message: Any) -> None:
            if message["type"] == "http.response.start" and self.service is not None:
                path = getattr(scope.get("route"), "path", "other")
                self.service.metrics.answered(path, message["status"])
            await send(message)

        self._num_active += 1
        app = self._app
        request = requests.Request(scope)
        try:
            check_framing(request)
            if not self._keys and self._loopback_name is not None:
                check_site(request, self._loopback_name)
        except ApiError as error:
            app = await _failed(request, error)
        try:
            await app(scope, receive, counting_send)
        finally:
            self._num_active -= 1

    async def drain(self, limit_s: float) -> int:
        """Refuse new requests; return when the open ones have been answered, or after the limit.

        The result is the number of requests that are still open.
        """
        self._is_draining = True
        end_s = time.monotonic() + limit_s
        while self._num_active and time.monotonic() < end_s:
            await asyncio.sleep(0.05)
        return self._num_active

    def _guarded(self, route: Route) -> Any:
        # The route decides about the key, not a comparison of paths of clients: nothing that they
        # send can make the two differ.
        async def guarded(request: Any) -> Any:
            if self._keys and not route.is_open:
                check_key(request.headers.get("authorization", ""), self._keys)
            if route.method == "GET":
                return await route.endpoint(request)
            service = self._ready()
            size = self._max_body_bytes
            body = await read_json(request, size, may_be_empty=route.may_be_empty)
            return await route.endpoint(service, request, body)

        return routing.Route(route.path, guarded, methods=[route.method])

    def _ready(self) -> Service:
        if self._is_draining:
            raise _not_now("the server is shutting down")
        if self.service is None:
            raise _not_now("the model is being loaded")
        if self.service.client.failure is not None:
            raise ApiError(self.service.client.failure, status=500)
        return self.service

    async def _models(self, request: Any) -> Any:
        """GET /v1/models and /v1/models/NAME: the model and its adapters."""
        service = self._ready()
        info = service.model.info
        name = request.path_params.get("name")
        common = {"object": "model", "created": _STARTED_AT, "owned_by": "megatron"}
        common["max_model_len"] = info.max_sequence_length
        found = {info.model: {"id": info.model, **common}}
        for adapter, path in service.adapters.items():
            found[adapter] = {"id": adapter, **common, "root": path, "parent": info.model}
        if name is None:
            return json_answer({"object": "list", "data": [*found.values()]})
        if name not in found:
            text = f"the model {name!r:.80} does not exist"
            raise ApiError(text, "model", status=404, code="model_not_found")
        return json_answer(found[name])

    async def _is_paused(self, request: Any) -> Any:
        """GET /is_paused: whether /pause has stopped the engine."""
        found = await self._ready().client.ask("is_paused", _HEALTH_TIMEOUT_S)
        return json_answer({"is_paused": found["is_paused"]})

    async def _tokenizer_info(self, request: Any) -> Any:
        """GET /tokenizer_info: for clients that tokenize by this server, such as lm-eval."""
        service = self._ready()
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

    async def _health(self, request: Any) -> Any:
        """GET /health and /ping: whether the engine answers."""
        try:
            await self._ready().client.ask("ping", _HEALTH_TIMEOUT_S)
        except TimeoutError as error:
            raise ApiError(str(error), status=503) from None
        return json_answer({"status": "ok"})

    async def _version(self, request: Any) -> Any:
        """GET /version: of the package."""
        return json_answer({"version": version()})

    async def _openapi(self, request: Any) -> Any:
        """GET /openapi.json: the paths of this server and their fields."""
        return json_answer(await describe(self._ready(), self._routes))

    async def _metrics(self, request: Any) -> Any:
        """GET /metrics, in Prometheus's format."""
        if self.service is None:
            raise _not_now("the model is being loaded")
        values = {}
        try:
            values = await self.service.client.ask("stats", _HEALTH_TIMEOUT_S)
        except (TimeoutError, EngineDied) as error:
            _LOG.warning("/metrics without the engine's values: %s", error)
        kind = "text/plain; version=0.0.4; charset=utf-8"
        return responses.Response(self.service.metrics.text(values), media_type=kind)


async def _page(name: str, request: Any) -> Any:
    headers = {"Content-Security-Policy": _PAGE_POLICY}
    text = (_FOLDER / name).read_text(encoding="utf-8")
    return responses.HTMLResponse(text, headers=headers)


def _not_now(reason: str) -> ApiError:
    return ApiError(reason, status=503, headers={"Retry-After": "5"})


async def _failed(request: Any, error: MegatronError) -> Any:
    found = as_api_error(error)
    if found.status >= 500:
        _LOG.error("%s %s: %s", request.method, request.scope["path"], found)
    return responses.JSONResponse(found.body, found.status, found.headers)


async def _gone(request: Any, error: ClientGone) -> Any:
    return responses.Response(status_code=499)  # nobody reads it


async def _no_route(request: Any, error: Any) -> Any:
    """Answer for an unknown path (404) or method (405)."""
    reason = "there is no such path" if error.status_code == 404 else "the method does not fit"
    text = f"{request.method} {request.scope['path']}: {reason}"
    return await _failed(request, ApiError(text, status=error.status_code, headers=error.headers))


async def _unexpected(request: Any, error: Exception) -> Any:
    text = "the server made a mistake; its log has the details"
    return await _failed(request, ApiError(text, status=500))


_STARTED_AT = int(time.time())
_MAX_TOKENS = 1 << 20


async def answer_tokenize(service: Service, request: Any, body: Body) -> Any:
    """POST /tokenize: text or messages -> ids."""
    fields = Fields(body)
    model = service.model
    service.check_model(fields)
    is_plain = not fields.boolean("add_special_tokens", True)
    has_texts = fields.boolean("return_token_strs")
    if body.get("messages") is None:
        text = fields.check_text("prompt", fields.get("prompt"))
        fields.refuse_others()
        (ids,) = await model.tokenize([text], is_plain=is_plain)
    else:
        prompt = ChatPrompt(service, fields, is_plain=is_plain)
        fields.refuse_others()
        ids, _ = await prompt.ids(1)
    longest = model.info.max_sequence_length
    texts = {"token_strs": [model.token_text(i) for i in text_of(ids)]} if has_texts else {}
    return json_answer({"tokens": ids, "count": len(ids), "max_model_len": longest, **texts})


async def answer_detokenize(service: Service, request: Any, body: Body) -> Any:
    """POST /detokenize: ids -> text."""
    fields = Fields(body)
    model = service.model
    service.check_model(fields)
    ids = fields.token_ids("tokens", fields.get("tokens"), model.info.vocab_size, _MAX_TOKENS)
    fields.refuse_others()
    (text,) = await model.decode_all([ids])
    return json_answer({"prompt": text})

"""The routes of the front end, its frame of each request, and endpoints that generate nothing."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from megatron.core.config.errors import MegatronError
from megatron.core.optional import require
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
from megatron.inference.server.openai_api import answer, read_chat, read_completion

starlette = require("starlette.applications", "the server")
routing = require("starlette.routing", "the server")
requests = require("starlette.requests", "the server")
exceptions = require("starlette.exceptions", "the server")

_LOG = logging.getLogger(__name__)
_PAGE = Path(__file__).parent / "page.html"
_PAGE_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; frame-ancestors 'none'"
)
_HEALTH_TIMEOUT_S = 10.0

Endpoint = Callable[[Service, Any, Body], Awaitable[Any]]
Work = Callable[[Any], Awaitable[Any]]  # request -> answer


class FrontEnd:
    """The ASGI application.  It answers 503 until it has a ``service``, and while it drains.

    ``loopback_name``: the name of --host, if only this machine reaches the server.
    """

    def __init__(
        self, keys: Sequence[str], max_body_bytes: int, loopback_name: str | None = None
    ) -> None:
        self.service: Service | None = None
        self.is_draining = False
        self._keys = keys
        self._loopback_name = loopback_name
        self._max_body_bytes = max_body_bytes
        self._num_active = 0
        self._idle = asyncio.Event()
        self._idle.set()
        posts: dict[str, Endpoint] = {
            "/v1/completions": partial(answer, read_completion),
            "/completions": partial(answer, read_completion),
            "/v1/chat/completions": partial(answer, read_chat),
            "/tokenize": answer_tokenize,
            "/detokenize": answer_detokenize,
            "/update_weights": answer_update_weights,
        }
        routes = [self._route(path, self._json(f), "POST") for path, f in posts.items()]
        routes += [
            self._route("/api", self._json(answer_api), "PUT"),
            self._route("/v1/models", self._models),
            self._route("/v1/models/{name:path}", self._models),
            self._route("/tokenizer_info", self._tokenizer_info),
            self._route("/health", self._health, needs_key=False),
            self._route("/metrics", self._metrics),
            routing.Route("/", self._page),
        ]
        handlers = {exceptions.HTTPException: _no_route, Exception: _unexpected}
        self._app = starlette.Starlette(routes=routes, exception_handlers=handlers)
        self._app.router.redirect_slashes = False  # the target would have the client's Host

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request; count it, and count it as active until its answer is sent."""
        if scope["type"] != "http":
            return
        self._num_active += 1
        self._idle.clear()

        async def counting_send(message: Any) -> None:
            if message["type"] == "http.response.start" and self.service is not None:
                route = scope.get("route")
                path = "other" if route is None else route.path
                self.service.metrics.answered(path, message["status"])
            await send(message)

        try:
            app = self._refuse(scope) or self._app
            await app(scope, receive, counting_send)
        finally:
            self._num_active -= 1
            if self._num_active == 0:
                self._idle.set()

    def _refuse(self, scope: Any) -> Any:
        """Return the answer to a request of which a proxy may see another end than this server.

        The same to a page of another site if nothing but the address protects us.
        """
        request = requests.Request(scope)
        try:
            check_framing(request)
            if not self._keys and self._loopback_name is not None:
                check_site(request, self._loopback_name)
        except ApiError as error:
            return responses.JSONResponse(error.body, error.status, error.headers)
        return None

    async def drain(self, limit_s: float) -> int:
        """Refuse new requests; return when the open ones have been answered, or after the limit.

        The result is the number of requests that are still open.
        """
        self.is_draining = True
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._idle.wait(), limit_s)
        return self._num_active

    def _route(self, path: str, work: Work, method: str = "GET", *, needs_key: bool = True) -> Any:
        # The route decides about the key, not a comparison of paths: nothing that the client
        # sends can make the two differ.
        async def endpoint(request: Any) -> Any:
            return await self._guarded(request, work, needs_key)

        return routing.Route(path, endpoint, methods=[method])

    def _json(self, answer: Endpoint) -> Work:
        async def work(request: Any) -> Any:
            service = self._ready()
            body = await read_json(request, self._max_body_bytes)
            return await answer(service, request, body)

        return work

    def _ready(self) -> Service:
        if self.is_draining:
            raise ApiError("the server is shutting down", status=503, retry_after_s=5)
        if self.service is None:
            raise ApiError("the model is being loaded", status=503, retry_after_s=5)
        if self.service.client.failure is not None:
            raise ApiError(self.service.client.failure, status=500)
        return self.service

    async def _guarded(self, request: Any, work: Work, needs_key: bool) -> Any:
        """Return the answer of ``work``, or an error object for its exception."""
        try:
            if self._keys and needs_key:
                check_key(request.headers.get("authorization", ""), self._keys)
            return await work(request)
        except ClientGone:
            return responses.Response(status_code=499)  # nobody reads it
        except MegatronError as error:
            found = as_api_error(error)
            if found.status >= 500:
                _LOG.error("%s %s: %s", request.method, request.scope["path"], found.message)
            return responses.JSONResponse(found.body, found.status, found.headers)

    async def _models(self, request: Any) -> Any:
        """GET /v1/models and /v1/models/NAME."""
        info = self._ready().model.info
        name = request.path_params.get("name")
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
            text = f"the model {name[:80]!r} does not exist"
            raise ApiError(text, "model", status=404, code="model_not_found")
        return json_answer(found)

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
        try:
            await self._ready().client.ask("ping", _HEALTH_TIMEOUT_S)
        except TimeoutError as error:
            raise ApiError(str(error), status=503) from None
        return json_answer({"status": "ok"})

    async def _metrics(self, request: Any) -> Any:
        if self.service is None:
            raise ApiError("the model is being loaded", status=503, retry_after_s=5)
        values = {}
        try:
            found = await self.service.client.ask("stats", _HEALTH_TIMEOUT_S)
            values = found["values"]
        except (TimeoutError, EngineDied) as error:
            _LOG.warning("/metrics without the engine's values: %s", error)
        kind = "text/plain; version=0.0.4; charset=utf-8"
        return responses.Response(self.service.metrics.text(values), media_type=kind)

    async def _page(self, request: Any) -> Any:
        headers = {"Content-Security-Policy": _PAGE_POLICY}
        return responses.HTMLResponse(_PAGE.read_text(encoding="utf-8"), headers=headers)


async def _no_route(request: Any, error: Any) -> Any:
    """Answer for an unknown path (404) or method (405)."""
    reason = "there is no such path" if error.status_code == 404 else "the method does not fit"
    path = request.scope["path"]
    found = ApiError(f"{request.method} {path}: {reason}", status=error.status_code)
    return responses.JSONResponse(found.body, error.status_code, error.headers)


async def _unexpected(request: Any, error: Exception) -> Any:
    found = ApiError("the server made a mistake; its log has the details", status=500)
    return responses.JSONResponse(found.body, 500)


_STARTED_AT = int(time.time())
_MAX_TOKENS = 1 << 20
_UPDATE_TIMEOUT_S = 600.0


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

"""The routes of the front end, and what it does before and after each request."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from megatron.core.config.errors import MegatronError
from megatron.core.optional import require
from megatron.inference.server.chat import answer_chat
from megatron.inference.server.completions import answer_completion
from megatron.inference.server.endpoint import Service, json_answer
from megatron.inference.server.engine_client import EngineDied
from megatron.inference.server.errors import ApiError, as_api_error
from megatron.inference.server.fields import Body
from megatron.inference.server.http import (
    ClientGone,
    check_framing,
    check_key,
    check_site,
    read_json,
    responses,
)
from megatron.inference.server.megatron_api import answer_api
from megatron.inference.server.other_endpoints import (
    answer_detokenize,
    answer_models,
    answer_tokenize,
    answer_tokenizer_info,
    answer_update_weights,
)

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

Answer = Callable[[Service, Any, Body], Awaitable[Any]]
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
        posts: dict[str, Answer] = {
            "/v1/completions": answer_completion,
            "/completions": answer_completion,
            "/v1/chat/completions": answer_chat,
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

    def _json(self, answer: Answer) -> Work:
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
        """Return the answer of ``work``, or the error object for what it raises."""
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
        return answer_models(self._ready(), request.path_params.get("name"))

    async def _tokenizer_info(self, request: Any) -> Any:
        return answer_tokenizer_info(self._ready())

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

"""GET /openapi.json: the paths of this server and the fields that each one reads.

The fields are those that the code of an endpoint reads from an example (`Example`), with their
types and ranges: they are written once, where they are checked.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import re
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from megatron.inference.server.fields import ApiError, Example, FieldsKnown
from megatron.inference.server.generation import Service
from megatron.inference.server.megatron_api import KNOWN
from megatron.inference.server.responses_api import NOT_OF_RESPONSES

# Service (of a POST or PUT), request and its body -> answer.
Endpoint: TypeAlias = Callable[..., Awaitable[Any]]


class Route(NamedTuple):
    """A path of the server; one that is not ``is_open`` needs a key if the server has keys.

    ``may_be_empty``: it needs no body.
    """

    method: str
    path: str
    endpoint: Endpoint
    is_open: bool = False
    may_be_empty: bool = False


_MESSAGES = [{"role": "user", "content": "Hello"}]
# Objects whose fields are described; the others appear by reading an object without them.
_INNER: dict[str, Any] = {"stream": True, "stream_options": {}, "structured_outputs": {}}
# Bodies from which each endpoint reads all its fields.
EXAMPLES: dict[str, list[dict[str, Any]]] = {
    "/v1/completions": [{**_INNER, "prompt": "Once upon", "response_format": {}}],
    "/v1/chat/completions": [{**_INNER, "messages": _MESSAGES, "response_format": {}}],
    "/v1/responses": [{**_INNER, "input": "Hello", "reasoning": {}, "text": {"format": {}}}],
    "/tokenize": [{"prompt": "Hello"}, {"messages": _MESSAGES}],
    "/detokenize": [{"tokens": [1]}],
    "/v1/embeddings": [{"input": "Hello"}],
    "/v1/load_lora_adapter": [{"lora_name": "sql", "lora_path": "adapters/sql"}],
    "/v1/unload_lora_adapter": [{"lora_name": "sql"}],
    "/update_weights": [{"load": "checkpoints/run1"}],
    "/update_weights_from_disk": [{"model_path": "checkpoints/run1"}],
}
EXAMPLES["/completions"] = EXAMPLES["/v1/completions"]
_TEXT = {"type": ["string", "null"]}
_INSIDE = {"type": "object", "properties": dict.fromkeys("message type param code".split(), _TEXT)}
_ERROR = {"type": "object", "properties": {"message": _TEXT, "error": _INSIDE}}


def version() -> str:
    """Return the version of the installed package."""
    try:
        return importlib.metadata.version("megatron-train")
    except importlib.metadata.PackageNotFoundError:
        return "0"  # sources that are not installed


async def describe(service: Service, routes: Sequence[Route]) -> dict[str, Any]:
    """Return the OpenAPI document of some routes."""
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        path = re.sub(r"{(\w+):\w+}", r"{\1}", route.path)
        paths.setdefault(path, {})[route.method.lower()] = await _operation(service, route, path)
    return {
        "openapi": "3.1.0",
        "info": {"title": f"Server of {service.model.info.model}", "version": version()},
        "paths": paths,
        "components": {
            "schemas": {"Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


async def _operation(service: Service, route: Route, path: str) -> dict[str, Any]:
    error = {"schema": {"$ref": "#/components/schemas/Error"}}
    name = re.sub(r"\W+", "_", f"{route.method.lower()}{path}").strip("_")
    found: dict[str, Any] = {
        "operationId": name,
        "summary": _summary(route.endpoint),
        "security": [] if route.is_open else [{}, {"key": []}],
        "responses": {
            "200": {"description": "The answer"},
            "default": {"description": "An error", "content": {"application/json": error}},
        },
    }
    names = re.findall(r"{(\w+)}", path)
    if names:
        found["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ]
    if route.method in ("POST", "PUT"):
        content = {"schema": await _body_schema(service, route)}
        if route.path in EXAMPLES:
            examples = enumerate(EXAMPLES[route.path], 1)
            content["examples"] = {f"example {i}": {"value": body} for i, body in examples}
        found["requestBody"] = {
            "required": not route.may_be_empty,
            "content": {"application/json": content},
        }
    return found


async def _body_schema(service: Service, route: Route) -> dict[str, Any]:
    """Return the JSON schema of the body of a request."""
    properties: dict[str, Any] = {name: {} for name in KNOWN} if route.path == "/api" else {}
    for values in EXAMPLES.get(route.path, ()):  # no other endpoint is called
        example = Example(values)
        try:
            await route.endpoint(service, None, example)
        except FieldsKnown:
            properties |= example.schema
        except ApiError:  # this server lacks the feature
            continue
    if route.path == "/v1/responses":  # a chat has read its own fields
        properties = {k: v for k, v in properties.items() if k not in NOT_OF_RESPONSES}
    if not properties:
        return {"type": "object"}
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _summary(endpoint: Endpoint) -> str:
    """Return the first line of the docstring of what answers a request."""
    of_kind = isinstance(endpoint, partial) and endpoint.args
    text = inspect.getdoc(endpoint.args[0] if of_kind else endpoint)  # type: ignore[attr-defined]
    return (text or "").partition("\n")[0]

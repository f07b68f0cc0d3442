"""Errors of the HTTP interface: {"error": {message, type, param, code}, "message": ...}.

The first is OpenAI's object, the second what clients of Megatron-LM's server print.
"""

from __future__ import annotations

from typing import Any

from megatron.core.config.errors import ConfigError, MegatronError
from megatron.core.inference.paged_engine.request import QueueFullError, RequestError

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(MegatronError):
    """An answer with ``status``; ``param`` names the field of the request to change.

    ``is_last``: the connection ends after it.
    """

    def __init__(
        self,
        message: str,
        param: str | None = None,
        *,
        status: int = 400,
        code: str | None = None,
        retry_after_s: int | None = None,
        is_last: bool = False,
    ) -> None:
        # Names of fields come from the client and may have half of a surrogate pair, which no
        # answer can be encoded with.
        message = message.encode("utf-8", "backslashreplace").decode()
        param = param and param.encode("utf-8", "backslashreplace").decode()
        super().__init__(message)
        self.message = message
        self.param = param
        self.status = status
        self.code = code
        self.retry_after_s = retry_after_s
        self.is_last = is_last

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object of the answer."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status, kind),
                "param": self.param,
                "code": self.code,
            },
            "message": self.message,
        }

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the answer."""
        if self.is_last:
            return {"Connection": "close"}
        if self.retry_after_s is not None:
            return {"Retry-After": str(self.retry_after_s)}
        return {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}


def as_api_error(error: MegatronError) -> ApiError:
    """Return the answer for an error of the engine or of a field."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFullError):
        return ApiError(str(error), status=429, code="queue_full", retry_after_s=1)
    if isinstance(error, RequestError):
        param = "response_format" if error.param == "grammar" else error.param
        return ApiError(str(error), param)
    if isinstance(error, ConfigError):
        return ApiError(str(error))
    return ApiError(str(error), status=500)

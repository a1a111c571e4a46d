"""Host. Every refusal as OpenAI's clients expect it: a status, and a body that says what, why and which field."""

import json
import logging
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from jaxspec.errors import CapacityError, EngineDeadError, QueueFullError, RequestError

logger = logging.getLogger(__name__)


class HttpError(Exception):
    """A refusal that has its own status; `param` names the field at fault, `code` is OpenAI's short name for it."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


class JsonResponse(Response):
    """JSON in pure ASCII: what a client sent may be echoed in an error, lone surrogates included."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")


def error_body(error: Exception) -> tuple[int, dict[str, Any]]:
    """Status and OpenAI-shaped body of an exception. What we did not foresee is logged and tells nothing away."""
    status, message, param, code = 500, "the server failed on this request; its log says why", None, None
    if isinstance(error, HttpError):
        status, message, param, code = error.status, str(error), error.param, error.code
    elif isinstance(error, RequestError):
        status, message, param = 400, str(error), error.param
    elif isinstance(error, QueueFullError):
        status, message = 429, str(error)
    elif isinstance(error, CapacityError):
        status, message = 400, str(error)
    elif isinstance(error, EngineDeadError):
        status, message = 503, str(error)
    elif isinstance(error, HTTPException):
        status, message = error.status_code, error.detail
    else:
        logger.error("request failed", exc_info=error)
    kind = "invalid_request_error" if status < 500 else "server_error"
    if status == 429:
        kind = "rate_limit_error"
    return status, {"error": {"message": message, "type": kind, "param": param, "code": code}}


async def error_response(request: Request, error: Exception) -> Response:
    """The response for an exception that a route raised."""
    status, body = error_body(error)
    headers = getattr(error, "headers", None)
    if status == 401:
        headers = {"WWW-Authenticate": "Bearer"}
    return JsonResponse(body, status_code=status, headers=headers)

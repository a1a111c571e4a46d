"""Host. Who may ask, and the line that every request leaves in the log, by its id."""

import hmac
import json
import logging
import re
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxspec.config.server import ServerConfig
from jaxspec.errors import ConfigError
from jaxspec.serve.errors import HttpError

logger = logging.getLogger(__name__)

_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
QUIET = ("/health", "/metrics")  # asked for by machines, all the time


def keys_of(config: ServerConfig) -> tuple[bytes, ...]:
    """All API keys there are; none: anybody may ask.

    Raises: ConfigError for a file that cannot be read or holds no key, which would open the server.
    """
    given = config.api_key or []
    keys = [given] if isinstance(given, str) else list(given)
    if config.api_key_file is not None:
        try:
            lines = Path(config.api_key_file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read api_key_file {config.api_key_file!r} ({error}); give a text file") from None
        found = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
        if not found:
            raise ConfigError(f"api_key_file {config.api_key_file!r} holds no key; write one a line, or leave it out")
        keys += found
    return tuple(key.encode() for key in keys)


def check_key(keys: Sequence[bytes], authorization: str) -> None:
    """Every key is compared, and each in the same time, so that a wrong guess tells nothing.

    Raises: HttpError with status 401.
    """
    scheme, _, given = authorization.partition(" ")
    offered = given.strip().encode()
    found = False
    for key in keys:
        found |= hmac.compare_digest(offered, key)
    if keys and not (found and scheme.lower() == "bearer"):
        raise HttpError(401, "this server needs its API key as 'Authorization: Bearer KEY'", code="invalid_api_key")


class AccessLog:
    """Middleware: gives a request its id, sends it back as X-Request-Id, and logs how the request ended."""

    def __init__(self, app: Any):
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
        request_id = given if _ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        began, status = time.monotonic(), 0

        async def send_with_id(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            level = logging.DEBUG if scope["path"] in QUIET else logging.INFO
            facts = {
                "request_id": request_id,
                "method": scope["method"],
                "path": scope["path"][:200],
                "status": status,
                "ms": round(1000 * (time.monotonic() - began), 1),
                **scope["state"].get("facts", {}),
            }
            # A path is a client's own words: as JSON it can begin no line of its own.
            words = " ".join(f"{name}={json.dumps(value)}" for name, value in facts.items())
            logger.log(level, words, extra={"facts": facts})


class JsonFormatter(logging.Formatter):
    """A log line as one JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        line |= getattr(record, "facts", None) or {"message": record.getMessage()}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)

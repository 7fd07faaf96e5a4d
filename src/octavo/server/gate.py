"""What every HTTP request passes first: an id, the key, the limit on its body; and what is logged of it in the end."""

from __future__ import annotations

import hmac
import logging
import re
import time
import uuid

from fastapi import HTTPException
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.server.errors import shape
from octavo.server.observe import Observer

logger = logging.getLogger("octavo.server.access")

_OPEN_PATHS = frozenset({"/health", "/ready", "/docs", "/openapi.json"})
"""No key is asked for these: probes have none, and the documentation is the same everywhere."""
_QUIET_PATHS = frozenset({"/health", "/ready", "/metrics"})


class Gate:
    """ASGI middleware around the whole app."""

    def __init__(self, app: ASGIApp, observer: Observer, api_key: str | None, max_body: int) -> None:
        self._app = app
        self._observer = observer
        self._key = None if api_key is None else api_key.encode()
        self._max_body = max_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start, status = time.monotonic(), 0
        headers = Headers(scope=scope)
        request_id = _request_id(headers.get("x-request-id"))
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        refusal = self._refusal(scope, headers)
        try:
            if refusal is not None:
                await refusal(scope, receive, send_with_id)
            else:
                await self._app(scope, self._limited(receive), send_with_id)
        finally:
            self._record(scope, request_id, status or 500, time.monotonic() - start)

    def _refusal(self, scope: Scope, headers: Headers) -> JSONResponse | None:
        if self._key is not None and scope["path"] not in _OPEN_PATHS:
            kind, _, key = headers.get("authorization", "").partition(" ")
            if kind.lower() != "bearer" or not hmac.compare_digest(key.strip().encode("latin-1"), self._key):
                message = "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'"
                return JSONResponse(shape(message, 401, code="invalid_api_key"), 401, {"www-authenticate": "Bearer"})
        length = headers.get("content-length", "")
        if length.isdigit() and int(length[:20]) > self._max_body:
            return JSONResponse(shape(self._too_large, 413), 413, {"connection": "close"})
        return None

    @property
    def _too_large(self) -> str:
        return f"the body is larger than max_body_size, {self._max_body} bytes"

    def _limited(self, receive: Receive) -> Receive:
        size = 0

        async def limited() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self._max_body:
                raise HTTPException(413, self._too_large)
            return message

        return limited

    def _record(self, scope: Scope, request_id: str, status: int, seconds: float) -> None:
        path = getattr(scope.get("route"), "path", "other")
        self._observer.saw_response(path, status)
        level = logging.DEBUG if scope["path"] in _QUIET_PATHS else logging.INFO
        logger.log(level, "%s %s %s %d %.3f s", request_id, scope["method"], path, status, seconds)


def _request_id(given: str | None) -> str:
    """The client's own id where it is one that can stand in a header and a log; else a new one."""
    return given if given is not None and re.fullmatch(r"[\w.:-]{1,128}", given, re.ASCII) else uuid.uuid4().hex

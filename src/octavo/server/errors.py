"""Every refusal in OpenAI's shape: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import logging
import re
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from octavo.errors import ContextLengthError, InvalidRequestError, OctavoError, QueueFullError
from octavo.server.protocol import ChatRequest, CompletionRequest, ResponsesRequest

logger = logging.getLogger(__name__)

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 503: "service_unavailable_error"}
_FIELDS = {*CompletionRequest.model_fields, *ChatRequest.model_fields, *ResponsesRequest.model_fields}


def shape(message: str, status: int, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The body of an error."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_body(error: OctavoError) -> dict[str, Any]:
    """The body for one of our own errors; the field it is about, where its message begins with one."""
    code = None if type(error) is InvalidRequestError else error.code
    param = None
    if isinstance(error, InvalidRequestError):
        first = re.match(r"(?:an? |the )?([a-z_]+)", str(error))
        param = first[1] if first and (first[1] in _FIELDS or " is not supported" in str(error)) else None
    if isinstance(error, ContextLengthError):
        param = "max_tokens" if "and max_tokens=" in str(error) else "prompt"
    return shape(str(error), error.http_status, param, code)


def error_response(error: OctavoError) -> JSONResponse:
    """The response for one of our own errors."""
    headers = {"retry-after": str(error.retry_after)} if isinstance(error, QueueFullError) else None
    return JSONResponse(error_body(error), error.http_status, headers)


async def _on_octavo_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, OctavoError)
    return error_response(error)


async def _on_http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    messages = {404: f"there is no {request.url.path}", 405: f"{request.url.path} does not take {request.method}"}
    message = messages.get(error.status_code, str(error.detail))
    return JSONResponse(shape(message, error.status_code), error.status_code, error.headers)


async def _on_invalid(request: Request, error: Exception) -> JSONResponse:
    """The first thing that is wrong, with the field that it is in."""
    assert isinstance(error, RequestValidationError)
    problems = error.errors()
    first = problems[0]
    where = [part for part in first["loc"] if part != "body"]
    if first["type"] == "json_invalid":
        return JSONResponse(shape(f"the body is not JSON: {first['ctx']['error']}", 400), 400)
    if not where:
        return JSONResponse(shape("the body must be a JSON object, sent with content-type application/json", 400), 400)
    param = str(where[0])
    wanted = "; or ".join(dict.fromkeys(p["msg"] for p in problems if str(p["loc"][1:2]) == str(first["loc"][1:2])))
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in where[1:])
    return JSONResponse(shape(f"{param[:200]}{path[:200] if len(problems) == 1 else ''}: {wanted[:1000]}", 400, param[:200]), 400)


async def _on_bug(request: Request, error: Exception) -> JSONResponse:
    logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return JSONResponse(shape("the server failed; its log says more", 500, code="internal_error"), 500)


def install_error_handlers(app: FastAPI) -> None:
    """Give all errors of an app OpenAI's shape."""
    app.add_exception_handler(OctavoError, _on_octavo_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(Exception, _on_bug)

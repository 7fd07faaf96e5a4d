"""Server-sent events: a stream of outputs as an ASGI response, one write for all that is there."""

from __future__ import annotations

import asyncio
import json
import logging
from contextlib import aclosing
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.engine.async_engine import Numbered
from octavo.errors import EngineError, OctavoError
from octavo.server.errors import error_body
from octavo.server.service import ClientGoneError, Job

logger = logging.getLogger(__name__)

STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}}
"""What a route's description says of answers that may be streamed."""
_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]


class Writer(Protocol):
    """Turns outputs into events, ready to be sent."""

    def begin(self) -> str:
        """Events before any output."""

    def write(self, item: Numbered) -> str:
        """Events for an output, which holds what is new; may be none."""

    def end(self) -> str:
        """Events after the last output."""

    def fail(self, error: OctavoError) -> str:
        """Events of a stream that fails."""


def event(data: str, name: str | None = None) -> str:
    """One event; ``data`` must hold no line break."""
    return f"data: {data}\n\n" if name is None else f"event: {name}\ndata: {data}\n\n"


def error_event(error: OctavoError) -> str:
    """What a stream says when it fails in the middle."""
    return event(json.dumps(error_body(error)))


class EventStream(Response):
    """Streams a job. A client that goes away ends it."""

    def __init__(self, job: Job, writer: Writer) -> None:
        super().__init__()
        self._job = job
        self._writer = writer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.create_task(self._job.watch(receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            await self._stream(send)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            watcher.cancel()

    async def _stream(self, send: Send) -> None:
        writer = self._writer
        try:
            async with aclosing(self._job.outputs()) as outputs:  # type: ignore[type-var]
                await _send(send, writer.begin())
                async for batch in outputs:
                    await _send(send, "".join([writer.write(item) for item in batch]) if batch else ": keep-alive\n\n")
            await _send(send, writer.end())
        except ClientGoneError:
            pass
        except OctavoError as error:
            await _send(send, writer.fail(error))
        except Exception as error:
            logger.exception("request %s: its stream failed", self._job.request_id)
            await _send(send, writer.fail(EngineError(f"the server failed: {type(error).__name__}")))


async def _send(send: Send, text: str) -> None:
    if text:
        message: dict[str, Any] = {"type": "http.response.body", "body": text.encode(), "more_body": True}
        await send(message)

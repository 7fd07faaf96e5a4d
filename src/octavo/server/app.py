"""The app: all routes, around one service."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import FastAPI, Request
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response

import octavo
from octavo.config import parse_bytes
from octavo.errors import InvalidRequestError
from octavo.server import chat, completions, responses
from octavo.server.completions import json_response, service_of
from octavo.server.errors import install_error_handlers
from octavo.server.gate import Gate
from octavo.server.protocol import ChatRequest, DetokenizeRequest, TokenizeRequest
from octavo.server.replies import ErrorReply, ModelCard, ModelList, Status, Text, Tokens
from octavo.server.service import Service

_ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorReply, "description": "The request is wrong."},
    401: {"model": ErrorReply, "description": "The API key is missing or wrong."},
    404: {"model": ErrorReply, "description": "There is no such model."},
    413: {"model": ErrorReply, "description": "The body is too large."},
    422: {"model": ErrorReply, "description": "Never used; wrong bodies are answered with 400."},
    429: {"model": ErrorReply, "description": "Too many requests wait; try again after Retry-After seconds."},
    500: {"model": ErrorReply, "description": "The engine failed while the request was running."},
    503: {"model": ErrorReply, "description": "The server is shutting down."},
    504: {"model": ErrorReply, "description": "The request took longer than the server allows."},
}


def create_app(service: Service) -> FastAPI:
    """An ASGI app that serves ``service``; the caller closes its engine."""
    app = FastAPI(
        title="Octavo", version=octavo.__version__, description="LLM inference with OpenAI's API.", redoc_url=None, responses=_ERRORS
    )
    app.state.service = service
    install_error_handlers(app)
    app.include_router(completions.router)
    app.include_router(chat.router)
    app.include_router(responses.router)
    _add_models(app)
    _add_text(app)
    _add_probes(app)
    config = service.config
    app.add_middleware(Gate, observer=service.observer, api_key=config.api_key, max_body=parse_bytes(config.max_body_size))
    if config.cors_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=config.cors_origins, allow_methods=["*"], allow_headers=["*"], expose_headers=["x-request-id"]
        )
    return app


def _add_models(app: FastAPI) -> None:
    def card(service: Service, name: str) -> dict[str, Any]:
        known = {"id": name, "object": "model", "created": service.created, "owned_by": "octavo"}
        return known | {"max_model_len": service.max_model_len}

    @app.get("/v1/models", response_model=ModelList, tags=["models"])
    async def list_models(request: Request) -> Response:
        """The models that are served: names of the same one."""
        service = service_of(request)
        return json_response({"object": "list", "data": [card(service, name) for name in service.names]})

    @app.get("/v1/models/{model:path}", response_model=ModelCard, tags=["models"])
    async def get_model(model: str, request: Request) -> Response:
        """One model."""
        service = service_of(request)
        return json_response(card(service, service.check_model(model)))


def _add_text(app: FastAPI) -> None:
    @app.post("/tokenize", response_model=Tokens, tags=["text"])
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        """Token ids of a prompt, or of messages as the chat template renders them."""
        service = service_of(request)
        service.check_model(body.model)
        body.check_extra()
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequestError("prompt or messages must be given, and not both")
        if body.prompt is not None:
            token_ids = await asyncio.to_thread(service.engine.text.tokenizer.encode, body.prompt, body.add_special_tokens)
        else:
            messages = ChatRequest.model_construct(messages=body.messages, add_generation_prompt=body.add_generation_prompt)
            [(_, token_ids)] = await chat.render(service, messages)
        return json_response({"tokens": token_ids, "count": len(token_ids), "max_model_len": service.max_model_len})

    @app.post("/detokenize", response_model=Text, tags=["text"])
    async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
        """The text of token ids; ids outside the vocabulary give none."""
        service = service_of(request)
        service.check_model(body.model)
        decode = service.engine.text.tokenizer.decode
        return json_response({"prompt": await asyncio.to_thread(decode, body.tokens, False)})


def _add_probes(app: FastAPI) -> None:
    @app.get("/health", response_model=Status, tags=["probes"])
    async def health() -> Response:
        """The process is alive."""
        return json_response({"status": "ok"})

    @app.get("/ready", response_model=Status, tags=["probes"])
    async def ready(request: Request) -> Response:
        """Requests can be answered: a step has run lately or the engine is idle, and the server is not shutting down."""
        problem = service_of(request).why_not_ready()
        return JSONResponse({"status": problem or "ready"}, 200 if problem is None else 503)

    @app.get("/metrics", tags=["probes"], response_class=Response)
    async def metrics(request: Request) -> Response:
        """Figures, in Prometheus' form."""
        return Response(await service_of(request).metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")

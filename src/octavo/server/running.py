"""A server's life: listen, load a model, serve, drain when told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from typing import Any


def run(engine_config: Any, config: Any, log_level: str = "info") -> None:
    """Serve until SIGTERM or SIGINT, then drain."""
    gc.disable()  # a tenth of the start would be spent on looking through modules and weights, which stay
    listener = _listen(config.host, config.port)
    sys.setswitchinterval(0.0005)  # the engine's thread and the event loop hand the interpreter over often
    # Half of the start is importing the web framework and half is loading weights, which needs the interpreter little.
    importing = threading.Thread(target=_import_server, daemon=True)
    importing.start()
    from octavo.engine.build import build_engine

    built = build_engine(engine_config)
    importing.join()

    import uvicorn

    from octavo.engine.async_engine import AsyncEngine
    from octavo.server.app import create_app
    from octavo.server.service import Service

    names = config.served_model_names or (engine_config.model.model,)
    engine = AsyncEngine(built.engine)
    service = Service(engine, config, names, engine_config.scheduler.max_num_seqs)

    if service.template is not None:
        threading.Thread(target=service.template.start, daemon=True).start()

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            """As the base class does, but a drained server ends with status 0 and not by its signal."""
            before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
            try:
                yield
            finally:
                for number, handler in before.items():
                    signal.signal(number, handler)

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            self.watchdog = asyncio.create_task(service.watch_engine())
            kind = "https" if config.ssl_certfile else "http"
            address, port = listener.getsockname()[:2]
            where = f"[{address}]" if ":" in address else address
            print(
                f"serving {', '.join(names)} at {kind}://{where}:{port}/v1; {built.weights.describe()}; {built.cache.describe()}",
                flush=True,
            )

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            service.drain()
            self.watchdog.cancel()
            await super().shutdown(sockets)

    settings = uvicorn.Config(
        create_app(service), log_level=log_level if log_level == "debug" else "warning", access_log=False, log_config=None,
        lifespan="off", server_header=False, ws="none", timeout_keep_alive=75,
        timeout_graceful_shutdown=round(config.drain_timeout) + 5,
        ssl_certfile=config.ssl_certfile, ssl_keyfile=config.ssl_keyfile,
    )  # fmt: skip
    gc.freeze()
    gc.enable()
    try:
        Server(settings).run(sockets=[listener])
    finally:
        engine.close(timeout=5.0)
        service.close()


def _import_server() -> None:
    import uvicorn.protocols.http.auto  # noqa: F401

    import octavo.server.app  # noqa: F401


def _listen(host: str, port: int) -> socket.socket:
    """Bind before the model is loaded, so that a port in use is found at once."""
    from octavo.errors import ConfigError

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}; choose another --port or --host") from error
    return listener

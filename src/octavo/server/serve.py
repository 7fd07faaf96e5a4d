"""``octavo serve``: load a model, listen, drain when told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer


def serve(
    model: Annotated[
        str, typer.Argument(help="Directory, .gguf file, hub id, or short name of an installed model package.")
    ] = "smollm2-135m",
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is every interface.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 8000,
    served_model_name: Annotated[list[str] | None, typer.Option(help="Name for clients; may be given several times.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="OCTAVO_API_KEY", help="Key that clients must send.")] = None,
    kv_memory: Annotated[
        str | None, typer.Option(help="Bytes for the KV cache, such as 1GiB. Default: a quarter of what is available, at most.")
    ] = None,
    num_blocks: Annotated[int | None, typer.Option(help="Number of KV blocks, instead of --kv-memory.")] = None,
    block_size: Annotated[int, typer.Option(help="Tokens per KV block: a power of two from 1 to 256.")] = 16,
    max_model_len: Annotated[int | None, typer.Option(help="Most tokens of one request, prompt and output together.")] = None,
    max_num_seqs: Annotated[int, typer.Option(help="Most requests that run in one step.")] = 256,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Most tokens computed in one step.")] = 512,
    policy: Annotated[str, typer.Option(help="fcfs, or priority: requests with a lower priority number run first.")] = "fcfs",
    enable_prefix_caching: Annotated[bool, typer.Option(help="Keep computed blocks findable for prompts that begin alike.")] = True,
    fork_mode: Annotated[str, typer.Option(help="How samples share their prompt: copy_on_write or recompute.")] = "copy_on_write",
    dtype: Annotated[str, typer.Option(help="auto (bfloat16; quantised weights stay so), float32 or bfloat16.")] = "auto",
    quantize: Annotated[
        str | None, typer.Option(help="native keeps quantised weights; int8 and int4 quantise (kept on disk for the next start).")
    ] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads. Default: the physical cores this process may use.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, or reference (NumPy: slow, the definition).")] = "auto",
    seed: Annotated[int, typer.Option(help="Seed of requests that bring none.")] = 0,
    cors_origin: Annotated[list[str] | None, typer.Option(help="Origin whose pages may call from a browser; '*' is all.")] = None,
    max_body_size: Annotated[str, typer.Option(help="Most bytes of a request's body.")] = "8MiB",
    max_prompts: Annotated[int, typer.Option(help="Most prompts in one call.")] = 256,
    max_queue: Annotated[int, typer.Option(help="Most samples that may wait; more get 429.")] = 1024,
    request_timeout: Annotated[float, typer.Option(help="Most seconds for a request; 0 is no limit.")] = 600.0,
    drain_timeout: Annotated[float, typer.Option(help="Seconds that running requests have left after SIGTERM.")] = 30.0,
    stall_timeout: Annotated[float, typer.Option(help="Seconds after which a step counts as hung, and /ready fails.")] = 60.0,
    keep_alive: Annotated[float, typer.Option(help="Seconds of silence after which a stream gets a comment.")] = 10.0,
    tool_parser: Annotated[str, typer.Option(help="How the model writes calls of tools: auto, hermes or llama3.")] = "auto",
    ssl_certfile: Annotated[str | None, typer.Option(help="Certificate for TLS.")] = None,
    ssl_keyfile: Annotated[str | None, typer.Option(help="Its key.")] = None,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
) -> None:
    """Serve a model over OpenAI's API.

    [bold]Examples[/]

        octavo serve --port 8000 --kv-memory 1GiB

        OCTAVO_API_KEY=secret octavo serve ./model --host 0.0.0.0 --served-model-name chat
    """
    options = locals()
    from octavo.config import CacheConfig, DeviceConfig, EngineConfig, ModelConfig, SchedulerConfig, ServerConfig

    if log_level not in ("debug", "info", "warning", "error"):
        raise typer.BadParameter("log level must be debug, info, warning or error")
    logging.basicConfig(level=log_level.upper(), format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    names = ("host", "port", "api_key", "max_body_size", "max_prompts", "max_queue", "request_timeout", "drain_timeout", "stall_timeout",
             "keep_alive", "tool_parser", "ssl_certfile", "ssl_keyfile")  # fmt: skip
    server = ServerConfig(
        served_model_names=tuple(served_model_name or ()), cors_origins=tuple(cors_origin or ()), **{name: options[name] for name in names}
    )
    engine = EngineConfig(
        model=ModelConfig(model, dtype, quantize),
        cache=CacheConfig(block_size, kv_memory, num_blocks, enable_prefix_caching),
        scheduler=SchedulerConfig(max_num_seqs, max_num_batched_tokens, max_model_len, policy, fork_mode=fork_mode),  # type: ignore[arg-type]
        device=DeviceConfig(device, threads),
        seed=seed,
    )
    run(engine, server, log_level)
    # Native threads and libraries have nothing to save, and a step that hangs must not keep the process.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def run(engine_config: Any, config: Any, log_level: str = "info") -> None:
    """Serve until SIGTERM or SIGINT, then drain."""
    listener = _listen(config.host, config.port)
    sys.setswitchinterval(0.0005)  # the engine's thread and the event loop hand the interpreter over often
    import threading

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

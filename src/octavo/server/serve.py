"""``octavo serve``: what can be set. Imports little, since all of the command line's help comes through here."""

from __future__ import annotations

import logging
import os
import sys
from typing import Annotated

import typer

from octavo.cli_options import (
    BlockSize,
    Device,
    Dtype,
    ForkMode,
    KVDtype,
    KVMemory,
    MaxModelLen,
    MaxNumBatchedTokens,
    MaxNumSeqs,
    NumBlocks,
    PrefixCaching,
    Quantize,
    Seed,
    SpeculativeTokens,
    Threads,
)


def serve(
    model: Annotated[
        str, typer.Argument(help="Directory, .gguf file, hub id, or short name of an installed model package.")
    ] = "smollm2-135m",
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is every interface.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 8000,
    served_model_name: Annotated[list[str] | None, typer.Option(help="Name for clients; may be given several times.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="OCTAVO_API_KEY", help="Key that clients must send.")] = None,
    kv_memory: KVMemory = None,
    num_blocks: NumBlocks = None,
    block_size: BlockSize = 16,
    max_model_len: MaxModelLen = None,
    max_num_seqs: MaxNumSeqs = 256,
    max_num_batched_tokens: MaxNumBatchedTokens = 512,
    policy: Annotated[str, typer.Option(help="fcfs, or priority: requests with a lower priority number run first.")] = "fcfs",
    enable_prefix_caching: PrefixCaching = True,
    fork_mode: ForkMode = "copy_on_write",
    speculative_tokens: SpeculativeTokens = 0,
    dtype: Dtype = "auto",
    quantize: Quantize = None,
    kv_dtype: KVDtype = "auto",
    threads: Threads = None,
    device: Device = "auto",
    seed: Seed = 0,
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
    from octavo.server.running import run

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
        cache=CacheConfig(block_size, kv_memory, num_blocks, enable_prefix_caching, kv_dtype),
        scheduler=SchedulerConfig(
            max_num_seqs,
            max_num_batched_tokens,
            max_model_len,
            policy,  # type: ignore[arg-type]
            fork_mode=fork_mode,
            speculative_tokens=speculative_tokens,
        ),
        device=DeviceConfig(device, threads),
        seed=seed,
    )
    run(engine, server, log_level)
    # Native threads and libraries have nothing to save, and a step that hangs must not keep the process.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)

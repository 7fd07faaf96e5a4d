"""``octavo plan``, and how it and ``octavo simulate`` find models, memory and times. Each imports what it needs when it runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from octavo.planner.known_models import PlannedModel
    from octavo.planner.latency_model import Device
    from octavo.planner.profile import Profile
    from octavo.planner.workload import SimRequest

Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Memory = Annotated[
    str | None, typer.Option(help="Bytes of a device or machine, such as 24GiB. Default: --gpu's, or what is available here.")
]
Gpu = Annotated[str | None, typer.Option(help="A device by name, such as H100: its memory, and its published speed.")]
Trace = Annotated[Path | None, typer.Option(help="CSV or JSON lines with arrivals, prompt and output tokens.")]
ProfileFile = Annotated[
    Path | None,
    typer.Option("--profile", help="Times that octavo bench kernels measured. Default: without --gpu, those of this model, if any."),
]
Dtype = Annotated[str, typer.Option(help="Of the weights: auto, bfloat16, float32, or fp8 and int8 on other machines.")]
Quantize = Annotated[str | None, typer.Option(help="native, int8 or int4, as the engine would be started with.")]


def plan(
    model: Annotated[str, typer.Argument(help="Directory with config.json, .gguf file, well-known name, or installed model package.")],
    memory: Memory = None,
    gpu: Gpu = None,
    dtype: Dtype = "auto",
    quantize: Quantize = None,
    kv_dtype: Annotated[
        list[str] | None,
        typer.Option(help="Of keys and values: bfloat16, float32, int8 or fp8; several to compare, the first for the engine's start."),
    ] = None,
    block_size: Annotated[int, typer.Option(help="Tokens per KV block, for the engine's start and the settings.")] = 16,
    kv_memory: Annotated[str | None, typer.Option(help="As the engine would be started with.")] = None,
    num_blocks: Annotated[int | None, typer.Option(help="As the engine would be started with.")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Most tokens of one request. Default: the model's own limit.")] = None,
    max_num_seqs: Annotated[int, typer.Option(help="Most requests that run in one step.")] = 256,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Most tokens computed in one step.")] = 512,
    prompt_len: Annotated[int, typer.Option(help="Typical prompt.")] = 161,
    output_len: Annotated[int, typer.Option(help="Typical output.")] = 339,
    trace: Trace = None,
    rate: Annotated[float | None, typer.Option(help="Requests a second to serve: how many replicas? Needs --gpu or a profile.")] = None,
    profile: ProfileFile = None,
    tensor_parallel: Annotated[
        int | None, typer.Option(help="Devices that share the model. Default: with --gpu as few as will do, else 1.")
    ] = None,
    as_json: Json = False,
) -> None:
    """What fits: blocks, tokens and requests at once, before anything is loaded.

    [bold]Examples[/]

        octavo plan llama-3.1-8b --memory 24GiB --max-model-len 8192

        octavo plan llama-3.1-8b --memory 8GiB --quantize int4

        octavo plan llama-3.1-70b --gpu H100 --rate 5

        octavo plan smollm2-135m --trace azure_llm_2023_conv.csv
    """
    from octavo.config import CacheConfig, SchedulerConfig
    from octavo.planner.memory_model import Lengths, plan_memory
    from octavo.planner.plan_report import describe_plan, load_for

    planned = find_model(model)
    lengths = [Lengths(r.prompt_len, r.output_len) for r in _trace(trace)] if trace else [Lengths(prompt_len, output_len)]
    found = plan_memory(
        planned,
        find_memory(memory, gpu),
        CacheConfig(block_size, kv_memory, num_blocks),
        SchedulerConfig(max_num_seqs, max_num_batched_tokens, max_model_len),
        dtype=dtype,
        quantize=quantize,
        kv_dtypes=tuple(kv_dtype or ("bfloat16", "int8")),
        lengths=lengths,
        tensor_parallel=tensor_parallel if gpu is not None else tensor_parallel or 1,
    )
    load = load_for(planned, found, lengths, rate, find_device(gpu, profile, model, quantize or dtype)) if rate is not None else None
    if as_json:
        print(json.dumps(found.as_dict() | {"load": load and load.as_dict()}, indent=1))
    else:
        print(describe_plan(planned, found, lengths, load))
    if not found.settings:
        raise typer.Exit(1)


def find_model(name: str) -> PlannedModel:
    """A model from a config alone: directory, GGUF header, well-known name, or installed package."""
    from octavo.planner.known_models import KNOWN_MODELS, PlannedModel, model_from_config

    path = Path(name).expanduser()
    if (path / "config.json").is_file():
        return model_from_config(path / "config.json")
    if name in KNOWN_MODELS and not path.exists():
        return KNOWN_MODELS[name]
    from octavo.errors import ModelLoadError
    from octavo.models.locate import locate
    from octavo.models.weights import open_checkpoint

    try:
        checkpoint = open_checkpoint(locate(name))
        return PlannedModel(name, checkpoint.spec, formats=checkpoint.formats())
    except ModelLoadError as error:
        raise ModelLoadError(f"{error} Well-known to the planner: {', '.join(KNOWN_MODELS)}.") from error


def find_memory(memory: str | None, gpu: str | None) -> int:
    """Bytes as they were given, else those of the device, else what is available here."""
    from octavo.config import parse_bytes
    from octavo.engine.memory import available_memory
    from octavo.planner.latency_model import named_device

    if memory is not None:
        return parse_bytes(memory)
    return named_device(gpu).memory if gpu is not None else available_memory()


def _trace(path: Path) -> list[SimRequest]:
    from octavo.planner.traces import read_trace

    return read_trace(path)


def find_device(gpu: str | None, profile: Path | None, model: str, weights: str = "auto") -> Device | Profile | None:
    """What tells the time of a step: a device that was named, else a profile; None where there is neither."""
    from octavo.planner.latency_model import named_device
    from octavo.planner.profile import find_profile, read_profile

    if gpu is not None and profile is None:
        return named_device(gpu)
    found = profile or find_profile(model, weights)
    return None if found is None else read_profile(found)

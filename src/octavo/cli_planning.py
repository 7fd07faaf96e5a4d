"""``octavo plan``, and how it and ``octavo simulate`` find models, memory and times. Each imports what it needs when it runs."""

from __future__ import annotations

import json
from functools import partial
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
    model: Annotated[str, typer.Argument(help="Directory with config.json, .gguf file, installed model package, or well-known name.")],
    memory: Memory = None,
    gpu: Gpu = None,
    dtype: Dtype = "auto",
    quantize: Quantize = None,
    kv_dtype: Annotated[
        list[str] | None,
        typer.Option(
            help="Of keys and values: auto (as the weights), bfloat16, float32, int8 or fp8; several to compare, the first for the engine's "
            "start. Default: auto and int8."
        ),
    ] = None,
    block_size: Annotated[int, typer.Option(help="Tokens per KV block, for the engine's start and the settings.")] = 16,
    kv_memory: Annotated[str | None, typer.Option(help="As the engine would be started with.")] = None,
    num_blocks: Annotated[int | None, typer.Option(help="As the engine would be started with.")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Most tokens of one request. Default: the model's own limit.")] = None,
    max_num_seqs: Annotated[int, typer.Option(help="Most requests that run in one step.")] = 256,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Most tokens computed in one step.")] = 512,
    prompt_len: Annotated[int | None, typer.Option(help="Tokens of a typical prompt. Default: 161, or what fits.")] = None,
    output_len: Annotated[int | None, typer.Option(help="Tokens of a typical output. Default: 339, or what fits.")] = None,
    trace: Trace = None,
    rate: Annotated[float | None, typer.Option(help="Requests a second to serve: how many replicas? Needs --gpu or a profile.")] = None,
    profile: ProfileFile = None,
    tensor_parallel: Annotated[
        int | None,
        typer.Option(
            help="Devices that share the model. Default: with --gpu as few as will do, with --rate those that serve it best; else 1."
        ),
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
    from octavo.planner.lengths import Lengths, typical_lengths
    from octavo.planner.memory_model import longest_request, plan_memory
    from octavo.planner.plan_report import describe_plan

    planned = find_model(model)
    cache, scheduler = CacheConfig(block_size, kv_memory, num_blocks), SchedulerConfig(max_num_seqs, max_num_batched_tokens, max_model_len)
    if trace is not None:
        lengths = [Lengths(r.prompt_len, r.output_len) for r in _trace(trace)]
    else:
        lengths = [typical_lengths(longest_request(planned.spec, scheduler), prompt_len, output_len)]
    plan_with = partial(
        plan_memory, planned, find_memory(memory, gpu), cache, scheduler,
        dtype=dtype, quantize=quantize, kv_dtypes=tuple(kv_dtype or ("auto", "int8")), lengths=lengths,
    )  # fmt: skip
    found, load = plan_with(tensor_parallel=1 if tensor_parallel is None and gpu is None else tensor_parallel), None
    if rate is not None and found.settings:
        from octavo.planner.load_plan import degrees_for, plan_load

        device = _speed_of(gpu, profile, model, quantize or dtype)
        degrees = degrees_for(planned, device) if tensor_parallel is None else [tensor_parallel]
        plans = [plan_with(tensor_parallel=degree) for degree in degrees]
        found, load = plan_load(planned, plans, lengths, rate, device)
    if as_json:
        print(json.dumps(found.as_dict() | {"load": load and load.as_dict()}, indent=1))
    else:
        print(describe_plan(planned, found, lengths, load))
    if not found.settings:
        raise typer.Exit(1)


def find_model(name: str) -> PlannedModel:
    """A model from a config alone: directory, GGUF header, installed package, or else well-known name.

    A package goes before the table, which does not know the formats of its weights. Raises ModelLoadError with what would be legal.
    """
    from octavo.errors import ModelLoadError
    from octavo.models.locate import locate
    from octavo.planner.known_models import KNOWN_MODELS, PlannedModel, model_from_config

    path = Path(name).expanduser()
    if (path / "config.json").is_file():
        return model_from_config(path / "config.json")
    try:
        found = locate(name)
    except ModelLoadError as error:
        if name in KNOWN_MODELS and not path.exists():
            return KNOWN_MODELS[name]
        raise ModelLoadError(f"{error} Well-known to the planner: {', '.join(KNOWN_MODELS)}.") from error
    from octavo.models.weights import open_checkpoint

    checkpoint = open_checkpoint(found)
    return PlannedModel(name, checkpoint.spec, formats=checkpoint.formats())


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


def _speed_of(gpu: str | None, profile: Path | None, model: str, weights: str) -> Device | Profile:
    """The same, where there has to be one."""
    from octavo.errors import ConfigError

    device = find_device(gpu, profile, model, weights)
    if device is None:
        raise ConfigError(
            f"the speed of the device is needed for a rate: name it with --gpu, or measure {model} here with `octavo bench kernels`"
        )
    return device

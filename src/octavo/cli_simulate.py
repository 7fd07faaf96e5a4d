"""``octavo simulate``. It imports what it needs when it runs."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli_planning import Dtype, Json, ProfileFile, Quantize, Trace, find_device, find_memory, find_model

if TYPE_CHECKING:
    from octavo.planner.studies import Study
    from octavo.planner.workload import SimRequest

OF_PAPER = ("paper", "num_requests", "seed", "placement", "plot", "html", "as_json")
OF_DRAWN = ("workload", "rate", "seed", "arrivals", "arrival_cv", "prompt_len", "output_len", "cancel")
OF_TRACE = ("speed",)
DEFAULT_REQUESTS, DEFAULT_PAPER_REQUESTS = 500, 400


def simulate(
    context: typer.Context,
    workload: Annotated[str, typer.Argument(help="chat, code, rag, agent, document, enterprise or classify.")] = "chat",
    trace: Trace = None,
    paper: Annotated[bool, typer.Option("--paper", help="The memory study of the PagedAttention paper, beside its figures.")] = False,
    num_requests: Annotated[
        int | None, typer.Option(help="Requests to draw, or to take from the trace. Default: 500, of the paper's study 400.")
    ] = None,
    rate: Annotated[float | None, typer.Option(help="Requests a second, instead of the workload's own.")] = None,
    arrivals: Annotated[str | None, typer.Option(help="poisson, gamma, bursts, even or at_once, instead of the workload's own.")] = None,
    arrival_cv: Annotated[float | None, typer.Option(help="Coefficient of variation of the gaps between gamma arrivals.")] = None,
    prompt_len: Annotated[float | None, typer.Option(help="Mean of a prompt's own tokens, before the workload's cut.")] = None,
    output_len: Annotated[float | None, typer.Option(help="Mean of output tokens, before the workload's cut.")] = None,
    cancel: Annotated[float | None, typer.Option(help="Share of requests, 0 to 1, whose callers give up.")] = None,
    speed: Annotated[float, typer.Option(help="How many times faster a trace is played.")] = 1.0,
    n: Annotated[int | None, typer.Option("--n", help="Samples of each request, which share its prompt.")] = None,
    beam_width: Annotated[int | None, typer.Option(help="Decode each request by a beam search of this width.")] = None,
    model: Annotated[str, typer.Option("--model", "-m", help="As in octavo plan.")] = "llama-3.1-8b",
    dtype: Dtype = "auto",
    quantize: Quantize = None,
    kv_dtype: Annotated[str, typer.Option(help="Of keys and values: auto (as the model), bfloat16, float32, int8 or fp8.")] = "auto",
    gpu: Annotated[
        str | None, typer.Option(help="A device by name: its memory and published speed. Default without a profile: A100-40GB.")
    ] = None,
    tensor_parallel: Annotated[int, typer.Option(help="Devices that share the model in each replica.")] = 1,
    profile: ProfileFile = None,
    memory: Annotated[
        str | None, typer.Option(help="Bytes of one device or of the machine, such as 24GiB. Default: as in octavo plan.")
    ] = None,
    kv_memory: Annotated[
        str | None, typer.Option(help="Bytes for keys and values, instead of what the device has left; several, comma-separated.")
    ] = None,
    scheme: Annotated[
        str,
        typer.Option(
            help="Comma-separated: paged, maximum, power_of_two, oracle, growing, each alone or with +static for static batching; or all."
        ),
    ] = "paged",
    block_size: Annotated[str, typer.Option(help="Tokens per block; several, comma-separated, or sweep for 1 to 256.")] = "16",
    placement: Annotated[
        str | None, typer.Option(help="Of contiguous regions: first_fit or buddy. Default: first_fit; of the paper's study buddy.")
    ] = None,
    prefix_caching: Annotated[bool, typer.Option(help="Find the beginnings of prompts in the cache.")] = True,
    max_model_len: Annotated[int, typer.Option(help="Most tokens of one request; longer ones are refused.")] = 8192,
    max_num_seqs: Annotated[int, typer.Option(help="Most requests that run in one step.")] = 256,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Most tokens computed in one step.")] = 2048,
    replicas: Annotated[int, typer.Option(help="Engines behind a router.")] = 1,
    router: Annotated[str, typer.Option(help="round_robin, sticky (by conversation), least_loaded or prefix_aware.")] = "round_robin",
    processes: Annotated[
        int | None, typer.Option(help="Most processes for the replicas of a router that needs no answers. Default: the CPUs there are.")
    ] = None,
    goodput_ttft: Annotated[
        float, typer.Option(help="Goodput counts requests whose first token came within so many seconds, and ...")
    ] = 2.0,
    goodput_tpot: Annotated[float, typer.Option(help="... whose following ones took so many seconds each, at most.")] = 0.2,
    seed: Annotated[int, typer.Option(help="Of what is drawn.")] = 0,
    plot: Annotated[Path | None, typer.Option(help="Write a figure: .png or .svg. Needs matplotlib.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a report: one HTML file with everything in it. Needs matplotlib.")] = None,
    as_json: Json = False,
) -> None:
    """Play a workload or a trace through the engine's own scheduler under a virtual clock.

    [bold]Examples[/]

        octavo simulate --paper

        octavo simulate chat --rate 20 --scheme all --kv-memory 4GiB

        octavo simulate chat --model smollm2-135m --rate 1

        octavo simulate chat --model llama-3.1-70b --gpu H100 --tensor-parallel 2

        octavo simulate --trace mooncake_conversation.jsonl --num-requests 1000 --max-model-len 131072 --gpu H100

        octavo simulate rag --block-size sweep --html report.html

        octavo simulate rag --arrivals gamma --arrival-cv 4 --output-len 400 --cancel 0.1

        octavo simulate chat --n 4

        octavo simulate chat --num-requests 1000000 --replicas 200 --rate 2000 --router sticky
    """
    from octavo.planner.output_files import check_outputs
    from octavo.planner.studies import run_study, show

    _check_given(context, paper, trace is not None)
    check_outputs(plot, html)
    if paper:
        _paper(num_requests, seed, placement, plot, html, as_json)
        return
    show(run_study(_study(context.params), _requests(context.params)), plot, html, as_json)


def _check_given(context: typer.Context, paper: bool, has_trace: bool) -> None:
    """Raises ConfigError for options that would have no effect, and for counts below 1."""
    from octavo.errors import ConfigError

    sources = {name: context.get_parameter_source(name) for name in context.params}
    given = {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}
    if paper:
        _refuse(given - set(OF_PAPER), f"--paper is a fixed study; it takes {_flags(OF_PAPER[1:])}")
    elif has_trace:
        _refuse(given & set(OF_DRAWN), "a trace brings its own requests; play it faster with --speed")
    else:
        _refuse(given & set(OF_TRACE), "only a --trace is played; a workload has a --rate")
    for name in ("num_requests", "processes"):
        value = context.params[name]
        if value is not None and value < 1:
            raise ConfigError(f"{_flag(name)} must be at least 1, not {value}")


def _refuse(names: set[str], why: str) -> None:
    from octavo.errors import ConfigError

    if names:
        raise ConfigError(f"{_flags(sorted(names))} would have no effect: {why}")


def _flag(name: str) -> str:
    return {"workload": "the workload", "as_json": "--json"}.get(name, "--" + name.replace("_", "-"))


def _flags(names: tuple[str, ...] | list[str]) -> str:
    *most, last = map(_flag, names)
    return f"{', '.join(most)} and {last}" if most else last


def _study(options: Mapping[str, Any]) -> Study:
    """What to run, of the command's options."""
    from octavo.planner.latency_model import named_device
    from octavo.planner.studies import Study

    gpu, model, trace = options["gpu"], options["model"], options["trace"]
    planned, device = find_model(model), find_device(gpu, options["profile"], model, options["quantize"] or options["dtype"])
    if device is None:
        gpu = "A100-40GB"
        device = named_device(gpu)
    return Study(
        title=trace.name if trace else options["workload"],
        model=planned,
        device=device,
        memory=find_memory(options["memory"], gpu),
        schemes=_list(options["scheme"]),
        block_sizes=_list(options["block_size"]),
        placement=options["placement"] or "first_fit",
        num_replicas=options["replicas"],
        processes=options["processes"] or _num_cpus(),
        max_ttft=options["goodput_ttft"],
        max_tpot=options["goodput_tpot"],
        **{name: options[name] for name in _OF_STUDY},
    )


_OF_STUDY = ("dtype", "quantize", "kv_dtype", "tensor_parallel", "kv_memory", "prefix_caching", "max_model_len", "max_num_seqs",
             "max_num_batched_tokens", "router")  # fmt: skip
"""Options that the study has by the same name."""


def _requests(options: Mapping[str, Any]) -> list[SimRequest]:
    from octavo.planner.traces import read_trace
    from octavo.planner.workload import with_outputs

    count = options["num_requests"] or DEFAULT_REQUESTS
    trace, n, beam_width = options["trace"], options["n"], options["beam_width"]
    requests = read_trace(trace, count, speed=options["speed"]) if trace else _drawn(options, count)
    return requests if n is None and beam_width is None else with_outputs(requests, n, beam_width)


def _drawn(options: Mapping[str, Any], count: int) -> list[SimRequest]:
    from dataclasses import replace

    from octavo.planner.adapted import adapted
    from octavo.planner.workload import named_workload

    workload = named_workload(options["workload"])
    workload = replace(workload, max_model_len=min(workload.max_model_len, options["max_model_len"]))
    changes = {name: options[name] for name in ("rate", "arrivals", "arrival_cv", "prompt_len", "output_len", "cancel")}
    return adapted(workload, **changes).requests(count, options["seed"])


def _paper(num_requests: int | None, seed: int, placement: str | None, plot: Path | None, html: Path | None, as_json: bool) -> None:
    from octavo.planner.paper import paper_study
    from octavo.planner.studies import named_placement

    study = paper_study(num_requests or DEFAULT_PAPER_REQUESTS, seed, named_placement(placement or "buddy"))
    print(json.dumps(study.as_dict(), indent=1) if as_json else study.describe())
    if plot is not None:
        from octavo.planner.plots import plot_paper

        plot_paper(study, plot)
    if html is not None:
        from octavo.planner.html_report import write_paper_html

        write_paper_html(study, html)


def _num_cpus() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _list(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())

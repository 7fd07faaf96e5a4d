"""``octavo bench``. Each command imports what it needs when it runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from octavo.cli_options import (
    BlockSize,
    Device,
    Dtype,
    ForkMode,
    Json,
    KVDtype,
    KVMemory,
    MaxModelLen,
    MaxNumBatchedTokens,
    MaxNumSeqs,
    Model,
    NumBlocks,
    PrefixCaching,
    ProgressBar,
    Quantize,
    Seed,
    SpeculativeTokens,
    Threads,
    load,
)

bench = typer.Typer(help="Measure.", no_args_is_help=True)


@bench.command()
def offline(
    workload: Annotated[Path | None, typer.Option(help='JSON list of {"prompt": [token ids], "max_tokens": count}.')] = None,
    trace: Annotated[Path | None, typer.Option(help="CSV with columns ContextTokens and GeneratedTokens.")] = None,
    num_requests: Annotated[int, typer.Option(help="Requests to draw, or to take from the trace.")] = 32,
    input_len: Annotated[int, typer.Option(help="Mean prompt length of drawn requests.")] = 128,
    output_len: Annotated[int, typer.Option(help="Mean output length of drawn requests.")] = 64,
    model: Model = "smollm2-135m",
    dtype: Dtype = "auto",
    quantize: Quantize = None,
    kv_dtype: KVDtype = "auto",
    block_size: BlockSize = 16,
    kv_memory: KVMemory = None,
    num_blocks: NumBlocks = None,
    max_model_len: MaxModelLen = None,
    max_num_seqs: MaxNumSeqs = 256,
    max_num_batched_tokens: MaxNumBatchedTokens = 512,
    enable_prefix_caching: PrefixCaching = True,
    fork_mode: ForkMode = "copy_on_write",
    speculative_tokens: SpeculativeTokens = 0,
    threads: Threads = None,
    device: Device = "auto",
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Run many requests at once and print throughput, latencies, KV use and waste.

    [bold]Examples[/]

        octavo bench offline --num-requests 64 --input-len 200 --output-len 100

        octavo bench offline --trace azure_llm_2023_conv.csv --num-requests 50 --max-model-len 2048
    """
    from octavo.bench.offline import run_offline
    from octavo.bench.report import print_offline
    from octavo.bench.workloads import json_workload, random_workload, trace_workload

    llm = load(locals())
    vocab_size, longest = llm.vocab_size, llm.max_model_len
    if workload is not None:
        requests = json_workload(workload)
    elif trace is not None:
        requests = trace_workload(trace, num_requests, longest, vocab_size, seed)
    else:
        requests = random_workload(num_requests, input_len, output_len, vocab_size, seed)
    with ProgressBar(len(requests), quiet=as_json) as progress:
        result = run_offline(llm, requests, progress.report)
    if as_json:
        print(json.dumps(result.as_dict(), indent=1))
    else:
        print_offline(result, llm.describe())


@bench.command()
def sharing(
    num_requests: Annotated[int, typer.Option(help="Requests of Alpaca's lengths; of ShareGPT's, a third of them.")] = 24,
    repeats: Annotated[int, typer.Option(help="Runs of each timing.")] = 3,
    fork_mode: ForkMode = "copy_on_write",
    model: Model = "smollm2-135m",
    dtype: Dtype = "auto",
    quantize: Quantize = None,
    kv_dtype: KVDtype = "auto",
    block_size: BlockSize = 16,
    kv_memory: KVMemory = None,
    max_model_len: MaxModelLen = 2048,
    threads: Threads = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Print what sharing blocks saves: memory with samples and beams, time with samples and shared prefixes. Takes minutes.

    [bold]Example[/]

        octavo bench sharing --num-requests 12
    """
    from dataclasses import asdict

    from octavo.bench.report import print_savings, print_timings
    from octavo.bench.sharing import measure_savings, measure_times

    llm = load(locals() | {"num_blocks": None, "max_num_seqs": 256, "max_num_batched_tokens": 512, "seed": 0})
    savings = measure_savings(llm, num_requests, lambda line: print(line, file=sys.stderr))
    timings = measure_times(llm, repeats)
    if as_json:
        print(json.dumps({"savings": [asdict(s) for s in savings], "timings": [asdict(t) for t in timings]}, indent=1))
    else:
        print_savings(savings, llm.describe())
        print_timings(timings)


@bench.command()
def kernels(
    model: Model = "smollm2-135m",
    dtype: Dtype = "auto",
    quantize: Quantize = None,
    block_size: BlockSize = 16,
    threads: Threads = None,
    device: Device = "auto",
    output: Annotated[Path | None, typer.Option(help="File of the profile. Default: where octavo plan and simulate look for it.")] = None,
    as_json: Json = False,
) -> None:
    """Measure how long steps and attention take on this machine. Takes a minute or two for a small model.

    Writes a profile, which octavo simulate and octavo plan use from then on for this model.

    [bold]Example[/]

        octavo bench kernels --model smollm2-135m

        octavo simulate chat --model smollm2-135m --rate 1
    """
    from octavo.bench.kernels import NUM_PARTS, describe_profile, engine_config, measure_profile
    from octavo.planner.profile import profile_path

    with ProgressBar(NUM_PARTS, quiet=as_json, what="measurements") as progress:
        profile, measured = measure_profile(engine_config(model, dtype, quantize, block_size, threads, device), progress.advance)
    path = output or profile_path(profile.model, profile.weights)
    profile.save(path)
    print(path.read_text() if as_json else f"{describe_profile(profile, measured)}\n\nWritten to {path}")

"""The command line. Each command imports what it needs when it runs, so that help is instant."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from octavo.cli_planning import register as register_planning
from octavo.server.serve import serve

if TYPE_CHECKING:
    from octavo.engine.outputs import CompletionOutput, RequestOutput
    from octavo.llm import LLM
    from octavo.request import SamplingParams

app = typer.Typer(
    name="octavo",
    help="LLM inference around PagedAttention: on the machine you have.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
bench = typer.Typer(help="Measure.", no_args_is_help=True)
app.add_typer(bench, name="bench")
app.command()(serve)
register_planning(app)

Model = Annotated[str, typer.Option("--model", "-m", help="Directory, .gguf file, hub id, or short name of an installed model package.")]
Dtype = Annotated[str, typer.Option(help="auto (bfloat16; quantised weights stay so), float32 or bfloat16.")]
Quantize = Annotated[
    str | None, typer.Option(help="native keeps quantised weights; int8 and int4 quantise (kept on disk for the next start).")
]
KVDtype = Annotated[str, typer.Option(help="Of keys and values: auto (as --dtype), float32, bfloat16 or int8.")]
BlockSize = Annotated[int, typer.Option(help="Tokens per KV block: a power of two from 1 to 256.")]
KVMemory = Annotated[
    str | None, typer.Option(help="Bytes for the KV cache, such as 1GiB. Default: a quarter of what is available, at most.")
]
NumBlocks = Annotated[int | None, typer.Option(help="Number of KV blocks, instead of --kv-memory.")]
MaxModelLen = Annotated[int | None, typer.Option(help="Most tokens of one request, prompt and output together.")]
MaxNumSeqs = Annotated[int, typer.Option(help="Most requests that run in one step.")]
MaxNumBatchedTokens = Annotated[int, typer.Option(help="Most tokens computed in one step.")]
PrefixCaching = Annotated[bool, typer.Option(help="Keep computed blocks findable for prompts that begin alike.")]
ForkMode = Annotated[
    Literal["copy_on_write", "recompute"],
    typer.Option(help="How samples share their prompt: as forks, or as requests through the prefix cache."),
]
SpeculativeTokens = Annotated[
    int, typer.Option(help="Most guesses at a request's next tokens that a step checks: faster where text repeats. 0 is off; try 8.")
]
Threads = Annotated[int | None, typer.Option(help="CPU threads. Default: the physical cores this process may use.")]
Device = Annotated[str, typer.Option(help="auto, cpu, or reference (NumPy: slow, the definition).")]
Seed = Annotated[int, typer.Option(help="Seed of requests that bring none.")]
Temperature = Annotated[float, typer.Option(help="0 takes the most likely token always.")]
TopK = Annotated[int, typer.Option(help="Keep the k most likely tokens; 0 keeps all.")]
TopP = Annotated[float, typer.Option(help="Keep the most likely tokens until their probabilities sum to this.")]
MinP = Annotated[float, typer.Option(help="Keep tokens at least this many times as likely as the best.")]
RepetitionPenalty = Annotated[float, typer.Option(help="Above 1, makes tokens seen before less likely.")]
MaxTokens = Annotated[int | None, typer.Option(help="Most tokens to generate.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def main() -> None:
    """Entry point: our own errors become one line and exit status 1."""
    from octavo.errors import OctavoError

    try:
        app()
    except OctavoError as error:
        print(f"octavo: {error}", file=sys.stderr)
        sys.exit(1)


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        from octavo import __version__

        print(f"octavo {__version__}")
        raise typer.Exit


@app.command()
def generate(
    prompts: Annotated[list[str] | None, typer.Argument(help="Prompts; '-' reads one per line from standard input.")] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="File with one prompt per line.")] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Put each prompt to the model as a user's message, through its chat template.")
    ] = False,
    max_tokens: MaxTokens = 64,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    stop: Annotated[list[str] | None, typer.Option(help="String that ends the output; may be given several times.")] = None,
    logprobs: Annotated[int | None, typer.Option(help="Log-probabilities of this many best tokens (with --json).")] = None,
    n: Annotated[int, typer.Option("--n", "-n", help="Outputs for each prompt: samples, or the best beams.")] = 1,
    best_of: Annotated[int | None, typer.Option(help="Draw this many samples and keep the n most likely ones.")] = None,
    beam_width: Annotated[int | None, typer.Option(help="Beam search with this many beams; takes --temperature 0.")] = None,
    length_penalty: Annotated[float, typer.Option(help="A beam's score is its log-probability / its length to this power.")] = 1.0,
    early_stopping: Annotated[str, typer.Option(help="When a beam search ends: true, false or never.")] = "false",
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
    """Complete prompts, all at once.

    [bold]Examples[/]

        octavo generate "The capital of France is" "Once upon a time"

        octavo generate --chat "Why is the sky blue?" --max-tokens 100

        octavo generate "Once upon a time" --n 4 --temperature 0.8

        octavo generate "The capital of France is" --beam-width 4 --n 2

        cat prompts.txt | octavo generate - --json
    """
    texts = _read_prompts(prompts or [], file)
    params = _params(locals() | {"early_stopping": _early_stopping(early_stopping)})
    llm = _load(locals())
    with _Progress(len(texts), quiet=as_json) as progress:
        if chat:
            outputs = llm.chat([[{"role": "user", "content": text}] for text in texts], params, errors="return", report=progress.report)
        else:
            outputs = llm.generate(texts, params, errors="return", report=progress.report)
    if as_json:
        print(json.dumps([_as_dict(text, output) for text, output in zip(texts, outputs, strict=True)], ensure_ascii=False, indent=1))
    else:
        _print_outputs(texts, outputs, "\n" if chat else "")
    if any(output.error for output in outputs):
        raise typer.Exit(1)


@app.command()
def chat(
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = 0.7,
    top_k: TopK = 0,
    top_p: TopP = 0.95,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.1,
    model: Model = "smollm2-135m",
    dtype: Dtype = "auto",
    quantize: Quantize = None,
    kv_dtype: KVDtype = "auto",
    block_size: BlockSize = 16,
    kv_memory: KVMemory = None,
    max_model_len: MaxModelLen = None,
    speculative_tokens: SpeculativeTokens = 0,
    threads: Threads = None,
    device: Device = "auto",
    seed: Seed = 0,
) -> None:
    """Talk with the model. Ctrl-C stops an answer; Ctrl-D or /exit leaves; /reset starts anew."""
    from octavo.chat import talk

    llm = _load(locals() | {"num_blocks": None, "max_num_seqs": 1, "max_num_batched_tokens": 512})
    talk(llm, _params(locals() | {"stop": None}), system)


@app.command()
def doctor(as_json: Json = False) -> None:
    """Report what Octavo runs on here, and what is missing, with the fix."""
    from octavo.doctor import diagnose, print_report

    facts = diagnose()
    if as_json:
        print(json.dumps(facts, indent=1))
    else:
        print_report(facts)
    if facts["problems"]:
        raise typer.Exit(1)


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

    llm = _load(locals())
    vocab_size, longest = llm.vocab_size, llm.max_model_len
    if workload is not None:
        requests = json_workload(workload)
    elif trace is not None:
        requests = trace_workload(trace, num_requests, longest, vocab_size, seed)
    else:
        requests = random_workload(num_requests, input_len, output_len, vocab_size, seed)
    with _Progress(len(requests), quiet=as_json) as progress:
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

    llm = _load(locals() | {"num_blocks": None, "max_num_seqs": 256, "max_num_batched_tokens": 512, "seed": 0})
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

    with _Progress(NUM_PARTS, quiet=as_json, what="measurements") as progress:
        profile, measured = measure_profile(engine_config(model, dtype, quantize, block_size, threads, device), progress.advance)
    path = output or profile_path(profile.model, profile.weights)
    profile.save(path)
    print(path.read_text() if as_json else f"{describe_profile(profile, measured)}\n\nWritten to {path}")


def _load(options: dict[str, Any]) -> LLM:
    from octavo.llm import LLM

    names = ["dtype", "quantize", "kv_dtype", "block_size", "kv_memory", "num_blocks", "max_model_len", "max_num_seqs", "max_num_batched_tokens",
             "enable_prefix_caching", "fork_mode", "speculative_tokens", "threads", "device", "seed"]  # fmt: skip
    return LLM(options["model"], **{name: options[name] for name in names if name in options})


def _params(options: dict[str, Any]) -> SamplingParams:
    from octavo.request import SamplingParams

    names = ["max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "logprobs", "n", "best_of", "beam_width",
             "length_penalty", "early_stopping"]  # fmt: skip
    return SamplingParams(**{name: options[name] for name in names if name in options}, stop=tuple(options["stop"] or ()))


def _early_stopping(text: str) -> Literal["never"] | bool:
    if text == "never":
        return "never"
    if text.lower() not in ("true", "false"):
        raise typer.BadParameter(f"--early-stopping is true, false or never, not {text!r}")
    return text.lower() == "true"


def _read_prompts(prompts: list[str], file: Path | None) -> list[str]:
    texts: list[str] = []
    for prompt in prompts:
        texts += [line.rstrip("\n") for line in sys.stdin if line.strip()] if prompt == "-" else [prompt]
    if file is not None:
        texts += [line for line in file.read_text().splitlines() if line.strip()]
    if not texts:
        raise typer.BadParameter("no prompts; give some as arguments, a file with --file, or '-' for standard input")
    return texts


class _Progress:
    """A bar on a terminal; of requests with tokens per second and KV use."""

    def __init__(self, total: int, quiet: bool, what: str = "requests") -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[speed]}"), TimeElapsedColumn(),
            console=console, transient=True, disable=quiet or not console.is_terminal,
        )  # fmt: skip
        self._task = self._bar.add_task(what, total=total, speed="")

    def __enter__(self) -> _Progress:
        self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.stop()

    def advance(self) -> None:
        self._bar.advance(self._task)

    def report(self, stats: dict[str, Any]) -> None:
        elapsed = self._bar.tasks[0].elapsed or 1e-9
        blocks = stats["blocks"]
        speed = f"{stats['num_tokens_generated'] / elapsed:,.0f} tokens/s, KV {blocks['used'] / blocks['total']:.0%}"
        self._bar.update(self._task, completed=sum(stats["num_finished"].values()), speed=speed)


def _print_outputs(texts: list[str], outputs: list[RequestOutput], between: str) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(soft_wrap=True)
    for text, output in zip(texts, outputs, strict=True):
        line = Text(text, style="bold")
        if output.error is not None:
            line.append(f" [{output.error}]", style="red")
        elif len(output.outputs) == 1:
            line.append(between + output.outputs[0].text, style="not bold green")
        else:
            for completion in output.outputs:
                score = "" if completion.score is None else f" score {completion.score:.3f}"
                line.append(f"\n[{completion.index}{score}]", style="not bold dim")
                line.append(completion.text, style="not bold green")
        console.print(line)
        console.print()


def _as_dict(text: str, output: RequestOutput) -> dict[str, Any]:
    """The prompt, all outputs, and the first of them once more at the top."""
    completions = [_completion(completion) for completion in output.outputs]
    entry = {"prompt": text, **completions[0], "num_prompt_tokens": len(output.prompt_token_ids), "outputs": completions}
    if output.error is not None:
        entry["error"] = {"message": str(output.error), "code": output.error.code}
    return entry


def _completion(completion: CompletionOutput) -> dict[str, Any]:
    names = ["text", "token_ids", "finish_reason", "stop_reason"]
    entry: dict[str, Any] = {name: getattr(completion, name) for name in names}
    for name in ("score", "cumulative_logprob"):
        if getattr(completion, name) is not None:
            entry[name] = getattr(completion, name)
    if completion.logprobs is not None:
        entry["logprobs"] = [{token: value._asdict() for token, value in position.items()} for position in completion.logprobs]
    return entry

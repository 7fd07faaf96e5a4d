"""The command line. Each command imports what it needs when it runs, so that help is instant."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from octavo.cli_bench import bench
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
    MaxTokens,
    MinP,
    Model,
    NumBlocks,
    PrefixCaching,
    ProgressBar,
    Quantize,
    RepetitionPenalty,
    Seed,
    SpeculativeTokens,
    Temperature,
    Threads,
    TopK,
    TopP,
    load,
)
from octavo.cli_planning import plan
from octavo.cli_simulate import simulate
from octavo.server.serve import serve

if TYPE_CHECKING:
    from octavo.engine.outputs import CompletionOutput, RequestOutput
    from octavo.request import SamplingParams

app = typer.Typer(
    name="octavo",
    help="LLM inference around PagedAttention: on the machine you have.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.add_typer(bench, name="bench")
app.command()(serve)
app.command()(plan)
app.command()(simulate)


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
    llm = load(locals())
    with ProgressBar(len(texts), quiet=as_json) as progress:
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

    llm = load(locals() | {"num_blocks": None, "max_num_seqs": 1, "max_num_batched_tokens": 512})
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

"""Options that several commands have, each with one help text, and what all of them do with them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from octavo.llm import LLM

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


def load(options: dict[str, Any]) -> LLM:
    """An engine, from those of a command's options that it knows."""
    from octavo.llm import LLM

    names = ["dtype", "quantize", "kv_dtype", "block_size", "kv_memory", "num_blocks", "max_model_len", "max_num_seqs", "max_num_batched_tokens",
             "enable_prefix_caching", "fork_mode", "speculative_tokens", "threads", "device", "seed"]  # fmt: skip
    return LLM(options["model"], **{name: options[name] for name in names if name in options})


class ProgressBar:
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

    def __enter__(self) -> ProgressBar:
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

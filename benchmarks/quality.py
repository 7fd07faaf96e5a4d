"""What quantised weights cost in quality: log-probabilities of real text beside float32 ``transformers`` on the same file's weights.

    python benchmarks/quality.py [--model NAME ...] [--tokens N] [--formats bf16,native,int8,int4] [--llama-perplexity PATH] [--blurred]

The text is the prose of the Python language reference that every Python brings along (``pydoc_data.topics``), cut into prompts of 512 tokens.
The oracle dequantises the file to float32, so a difference is what a format adds: rounded weights, rounded inputs of products, other sums.
``--blurred`` stands in for a checkpoint of floats where only a quantised file is at hand: each weight is moved at random within its
rounding step, which gives back what quantising took from the weights' distribution, and the result is the model that is measured.

With the binary of llama.cpp, its perplexity on the same text and file is measured by its own rule (the second half of each window counts).
"""

from __future__ import annotations

import argparse
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo import LLM, SamplingParams
from octavo.kernels.dequantize import dequantize, split
from octavo.models.locate import locate
from octavo.models.weights import _HF_NAMES, _file_name, open_checkpoint

TOPICS = ("execmodel", "types", "compound", "customization", "import", "attribute-access", "naming", "calls")
WINDOW = 512
FORMATS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"}, "bf16": {"dtype": "bfloat16"}, "native": {"quantize": "native"},
    "int8": {"quantize": "int8"}, "int4": {"quantize": "int4"},
}  # fmt: skip

Floats = NDArray[np.float64]
Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Scored:
    """Of every token of all windows but each first one."""

    logprobs: Floats
    best: Ids
    """The token that would have been most likely."""

    @property
    def perplexity(self) -> float:
        return float(np.exp(-self.logprobs.mean()))

    def second_half(self) -> float:
        """Perplexity of the later half of each window, as llama.cpp counts it."""
        rows = self.logprobs.reshape(-1, WINDOW - 1)
        return float(np.exp(-rows[:, WINDOW // 2 :].mean()))


@dataclass(frozen=True, slots=True)
class Difference:
    """One way of computing beside the oracle."""

    mean: float
    """Of |difference of log-probability|."""
    p99: float
    agreement: float
    """Share of positions with the same most likely token."""


def text() -> str:
    return "\n\n".join(topics[name] for name in TOPICS)


def windows(token_ids: Sequence[int], num_tokens: int) -> list[list[int]]:
    return [list(token_ids[i : i + WINDOW]) for i in range(0, min(num_tokens, len(token_ids)) - WINDOW + 1, WINDOW)]


def score(llm: LLM, prompts: list[list[int]]) -> Scored:
    """By Octavo."""
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1, cache_prefix=False))
    logprobs, best = [], []
    for output in outputs:
        assert output.prompt_logprobs is not None
        for token, position in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
            assert position is not None
            logprobs.append(position[token].logprob)
            best.append(next(candidate for candidate, entry in position.items() if entry.rank == 1))
    return Scored(np.array(logprobs), np.array(best))


def oracle(path: Path) -> Any:
    """The transformers model of a file or directory, in float32, its weights dequantised."""
    import torch
    import transformers

    load = transformers.AutoModelForCausalLM.from_pretrained
    if path.is_dir():
        return load(path, dtype=torch.float32).eval()
    dequantised = transformers.GgufConfig(dequantize=True)
    return load(path.parent, gguf_file=path.name, dtype=torch.float32, quantization_config=dequantised).eval()


def blur(path: Path, target: Path) -> None:
    """Write a quantised file as a bfloat16 directory with each weight moved evenly within half a step of its codes."""
    import torch
    import transformers

    checkpoint, model, chance = open_checkpoint(path), oracle(path), np.random.default_rng(0)
    parameters = dict(model.named_parameters())
    for name, shape in checkpoint.spec.matrix_shapes().items():
        source = checkpoint.tensor(name)
        parts = split(source.format, source.data, shape[0] * shape[1])
        steps = np.abs(parts.scales)[:, None] * chance.uniform(-0.5, 0.5, parts.codes.shape)
        moved = dequantize(source.format, source.data, shape[0] * shape[1]).reshape(shape) + steps.reshape(shape)
        moved = moved if source.row_order is None else moved[source.row_order]
        parameters[_file_name(name, _HF_NAMES, "model.layers")].data.copy_(torch.from_numpy(moved))
    model.to(torch.bfloat16).save_pretrained(target)
    transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(target)


def score_by(model: Any, prompts: list[list[int]]) -> Scored:
    """By transformers."""
    import torch

    logprobs, best = [], []
    for prompt in prompts:
        ids = torch.tensor(prompt)
        with torch.no_grad():
            rows = torch.log_softmax(model(ids[None]).logits[0, :-1].double(), -1)
        logprobs.append(rows.gather(1, ids[1:, None])[:, 0].numpy())
        best.append(rows.argmax(-1).numpy())
    return Scored(np.concatenate(logprobs), np.concatenate(best))


def compare(found: Scored, expected: Scored) -> Difference:
    difference = np.abs(found.logprobs - expected.logprobs)
    return Difference(float(difference.mean()), float(np.quantile(difference, 0.99)), float((found.best == expected.best).mean()))


def llama_perplexity(binary: Path, model: Path, num_windows: int) -> float:
    """By llama.cpp's own tool, over the same windows of the same text."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(text())
        file.flush()
        command = [str(binary), "-m", str(model), "-f", file.name, "-c", str(WINDOW), "--chunks", str(num_windows)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = re.search(r"PPL = ([\d.]+)", done.stdout + done.stderr)
    if found is None:
        raise SystemExit(f"{binary} told no perplexity:\n{done.stderr[-2000:]}")
    return float(found[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=["smollm2-135m"])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--llama-perplexity", type=Path, default=None)
    parser.add_argument("--blurred", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for name in args.model:
            path = locate(name)
            if args.blurred:
                blur(path, Path(folder))
                path = Path(folder)
            measure(name, path, args)


def measure(model: str, path: Path, args: argparse.Namespace) -> None:
    """Print the table of one model."""
    from common import show

    rows: list[list[object]] = []
    expected: Scored | None = None
    for name in args.formats.split(","):
        with LLM(str(path), **FORMATS[name], kv_memory="256MiB", max_model_len=WINDOW + 16, threads=args.threads) as llm:
            prompts = windows(llm.tokenizer.encode(text()), args.tokens)
            expected = expected or score_by(oracle(path), prompts)
            found, formats = score(llm, prompts), llm.stats()["weights"]["formats"]
        d = compare(found, expected)
        print(f"{name}: {d}, perplexity {found.perplexity:.3f}", file=sys.stderr)
        rows.append([name, formats, f"{d.mean:.4f}", f"{d.p99:.3f}", f"{d.agreement:.3f}", f"{found.perplexity:.3f}",
                     f"{found.second_half():.3f}"])  # fmt: skip
    assert expected is not None and prompts
    rows.append(["transformers", "float32", "", "", "", f"{expected.perplexity:.3f}", f"{expected.second_half():.3f}"])
    if args.llama_perplexity is not None:
        rows.append(["llama.cpp", "the file's", "", "", "", "", f"{llama_perplexity(args.llama_perplexity, path, len(prompts)):.3f}"])
    title = f"{model}{' blurred' if args.blurred else ''}, {len(prompts)} x {WINDOW} tokens of pydoc_data.topics of Python {platform.python_version()}"
    show(title, ["", "weights", "mean |d logprob|", "p99", "top-1 as oracle", "perplexity", "of second halves"], rows)


if __name__ == "__main__":
    main()

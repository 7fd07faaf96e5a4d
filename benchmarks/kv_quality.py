"""What a KV dtype costs in quality: ``python benchmarks/kv_quality.py [files of text]``; by default Octavo's own documentation.

Every window of a text is computed once with each KV dtype and the same weights in bfloat16; the distributions of all next tokens are compared with
those of KV in float32. Then prompts are continued greedily, and each continuation compared with the one of KV in bfloat16.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from common import THREADS, show

from octavo import LLM, SamplingParams
from octavo.kernels.native import NativeBackend
from octavo.kernels.ops import Array, AttentionBatch, KVShape, Size
from octavo.models.decoder import Activations, Decoder, DecoderInputs
from octavo.models.decoder_weights import pack_weights
from octavo.models.locate import locate
from octavo.models.weights import open_checkpoint

MODEL, WINDOW, NUM_WINDOWS, BLOCK_SIZE = "smollm2-135m", 512, 16, 16
KV_DTYPES = ("float32", "bfloat16", "int8")
NUM_PROMPTS, PROMPT_LEN, OUTPUT_LEN = 32, 128, 64


class Reader:
    """A decoder that gives the logits of all positions of one window."""

    def __init__(self, backend: NativeBackend, decoder: Decoder, kv_dtype: str) -> None:
        spec, every = decoder.spec, np.arange(WINDOW, dtype=np.int32)
        self._sizes = np.zeros(len(Size), np.int32)
        self._tokens = np.zeros(WINDOW, np.int32)
        starts, table = np.array([0, WINDOW], np.int32), np.arange(WINDOW // BLOCK_SIZE, dtype=np.int32)[None]
        batch = AttentionBatch(starts, np.zeros(1, np.int32), table, every, every)
        shape = KVShape(spec.num_layers, table.size, BLOCK_SIZE, spec.num_kv_heads, spec.head_dim, kv_dtype)
        self._activations = Activations.allocate(backend, spec, "bfloat16", WINDOW, WINDOW)
        self._program = backend.program(self._sizes)
        decoder.record(self._program, DecoderInputs(self._tokens, batch, every), backend.kv_cache(shape), self._activations)

    def log_probabilities(self, tokens: Array) -> Array:
        self._tokens[:] = tokens
        self._sizes[Size.ROWS] = self._sizes[Size.SAMPLES] = WINDOW
        self._sizes[Size.REQUESTS] = 1
        self._program.run()
        logits = self._activations.logits.astype(np.float64)
        logits -= logits.max(-1, keepdims=True)
        return np.asarray(logits - np.log(np.exp(logits).sum(-1, keepdims=True)))


def compare_distributions(windows: Array) -> None:
    backend = NativeBackend(threads=THREADS)
    checkpoint = open_checkpoint(locate(MODEL))
    decoder = Decoder(checkpoint.spec, pack_weights(checkpoint, backend, "bfloat16", WINDOW))
    readers = {kv_dtype: Reader(backend, decoder, kv_dtype) for kv_dtype in KV_DTYPES}
    found: dict[str, list[Any]] = {kv_dtype: [] for kv_dtype in KV_DTYPES}
    for tokens in windows:
        logs = {kv_dtype: reader.log_probabilities(tokens) for kv_dtype, reader in readers.items()}
        exact = logs["float32"]
        for kv_dtype, log in logs.items():
            divergence = (np.exp(exact) * (exact - log)).sum(-1)
            surprise = -log[np.arange(WINDOW - 1), tokens[1:]]
            found[kv_dtype].append((divergence, log.argmax(-1) == exact.argmax(-1), surprise))
    rows = []
    for kv_dtype, parts in found.items():
        divergence, agree, surprise = (np.concatenate(part) for part in zip(*parts, strict=True))
        rows.append([kv_dtype, f"{divergence.mean():.2e}", f"{np.quantile(divergence, 0.99):.2e}", f"{divergence.max():.2e}",
                     f"{agree.mean():.2%}", f"{np.exp(surprise.mean()):.4f}"])  # fmt: skip
    columns = ["KV dtype", "KL to float32 KV, mean", "p99", "largest", "same best token", "perplexity"]
    show(f"{windows.size:,} tokens of text, windows of {WINDOW}", columns, rows)


def compare_outputs(windows: Array) -> None:
    stream = windows.reshape(-1)
    prompts = [stream[i : i + PROMPT_LEN].tolist() for i in np.linspace(0, len(stream) - PROMPT_LEN, NUM_PROMPTS, dtype=int)]
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT_LEN, ignore_eos=True)
    outputs = {}
    for kv_dtype in KV_DTYPES:
        with LLM(MODEL, kv_dtype=kv_dtype, kv_memory="1GiB", threads=THREADS) as llm:
            outputs[kv_dtype] = np.array([output.outputs[0].token_ids for output in llm.generate(prompts, params)])
    rows = []
    for kv_dtype in KV_DTYPES:
        same = outputs[kv_dtype] == outputs["bfloat16"]
        until = np.cumprod(same, axis=1).sum(1)
        rows.append([kv_dtype, f"{(until == OUTPUT_LEN).mean():.0%}", f"{until.mean():.0f}", f"{same.mean():.0%}"])
    columns = ["KV dtype", "all tokens equal", "equal tokens before the first that differs, mean", "equal in place"]
    show(f"{NUM_PROMPTS} prompts of {PROMPT_LEN} tokens, {OUTPUT_LEN} greedy tokens each, against bfloat16 KV", columns, rows)


def main(paths: list[str]) -> None:
    files = [Path(path) for path in paths] or sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
    with LLM(MODEL, kv_memory="64MiB", threads=THREADS) as llm:
        ids = np.array(llm.tokenizer.encode("\n".join(path.read_text() for path in files)), np.int32)
    count = min(NUM_WINDOWS, len(ids) // WINDOW)
    if count == 0:
        sys.exit(f"a text of {len(ids)} tokens has no window of {WINDOW}; give more text")
    windows = ids[: count * WINDOW].reshape(count, WINDOW)
    compare_distributions(windows)
    compare_outputs(windows)


if __name__ == "__main__":
    main(sys.argv[1:])

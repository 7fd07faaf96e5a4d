"""Small random models without a file: what the engine's own tests run on, on any backend."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np

from octavo.kernels.ops import TensorSource
from octavo.models.spec import DecoderSpec, RotarySpec
from octavo.models.weights import Checkpoint, Generation, expected_shapes
from tests.helpers.quantised import random_source

TINY = DecoderSpec(
    architecture="LlamaForCausalLM", num_layers=2, hidden_size=48, num_heads=6, num_kv_heads=2, head_dim=32, ffn_size=80,
    vocab_size=203, max_position=4096, rotary=RotarySpec(32), tied_head=True,
)  # fmt: skip


def random_checkpoint(spec: DecoderSpec = TINY, seed: int = 0, scale: float = 3.0) -> Checkpoint:
    """A checkpoint of normally distributed float32 weights; ``scale`` makes its choices sharp enough to differ."""
    chance = np.random.default_rng(seed)
    tensors = {}
    for name, shape in expected_shapes(spec).items():
        deviation = scale / np.sqrt(shape[-1]) if len(shape) == 2 else 0.1
        values = chance.normal(1.0 if name.endswith("norm") else 0.0, deviation, shape).astype(np.float32)
        tensors[name] = TensorSource(name, shape, "F32", values.reshape(-1).view(np.uint8))
    return Checkpoint(
        Path("random"), spec, Generation(frozenset({0}), None), None, tuple(tensors), tensors.__getitem__, lambda source: None
    )


def quantised(checkpoint: Checkpoint) -> Checkpoint:
    """The same with its matrices quantised, in formats that differ within a stack; rows must be multiples of 32."""
    import gguf

    formats = {"q": "Q8_0", "k": "Q4_1", "v": "Q4_1", "o": "Q5_0", "gate": "Q4_0", "up": "Q5_1", "down": "Q4_1", "embed": "Q8_0"}

    def find(name: str) -> TensorSource:
        source, format = checkpoint.tensor(name), formats.get(name.rpartition(".")[2])
        if format is None:
            return source
        values = source.data.view(np.float32).reshape(source.shape)
        data = gguf.quantize(values, gguf.GGMLQuantizationType[format])
        return TensorSource(name, source.shape, format, np.ascontiguousarray(data).reshape(-1))

    return replace(checkpoint, _find=cache(find))


SUPER_FORMATS = {"q": "Q3_K", "k": "Q4_K", "v": "Q4_K", "o": "IQ4_XS", "gate": "Q2_K", "up": "Q5_K", "down": "Q6_K", "embed": "IQ4_NL"}


def super_quantised(checkpoint: Checkpoint) -> Checkpoint:
    """The same with matrices of random codes in the formats that no library writes; rows must be multiples of 256."""

    def find(name: str) -> TensorSource:
        source, format = checkpoint.tensor(name), SUPER_FORMATS.get(name.rpartition(".")[2])
        if format is None:
            return source
        rows, columns = source.shape
        return replace(random_source(format, rows, columns, seed=len(name)), name=name)

    return replace(checkpoint, _find=cache(find))


def with_window(spec: DecoderSpec, window: int) -> DecoderSpec:
    return replace(spec, sliding_window=window)
